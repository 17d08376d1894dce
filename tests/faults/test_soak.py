"""A run of weeks in minutes: nothing grows with its batches but the batch log, by less than 1 kB a batch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parent / "soak.py"
WARM = 2  # tenths until buffers, pools and caches stand


def soak(folder: Path, batches: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    done = subprocess.run([sys.executable, str(SOAK), str(folder), str(batches)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *looks, whole = map(json.loads, done.stdout.splitlines())
    print(*looks, whole, sep="\n")
    return looks, whole


def check_flat(looks: list[dict[str, Any]], whole: dict[str, Any], *, mib: float) -> None:
    warm, last = looks[WARM - 1 : -1], looks[-1]
    assert whole["exit_code"] == 0 and len(looks) == 10
    assert {look["threads"] for look in warm} == {warm[0]["threads"]}
    files = [look["open_files"] for look in [*warm, last]]
    assert max(files) - min(files) <= 1, "but for a shard that is being made at the moment of the look"
    assert last["threads"] <= warm[0]["threads"]
    assert max(look["resident_mib"] for look in [*warm, last]) - warm[0]["resident_mib"] < mib
    assert whole["log_bytes_per_batch"] < 1000


def test_memory_files_and_threads_are_flat_over_600_batches(tmp_path: Path, faults) -> None:
    check_flat(*soak(tmp_path, 600), mib=16)


@pytest.mark.slow
def test_memory_files_and_threads_are_flat_over_20000_batches(tmp_path: Path, faults) -> None:
    """The README says how a run went; neighbours slow single tenths down, so the best of each half are compared."""
    looks, whole = soak(tmp_path, 20_000)
    check_flat(looks, whole, mib=8)
    first, second = (min(look["cpu_ms_a_batch"] for look in half) for half in (looks[:5], looks[5:]))
    assert second < 1.15 * first
