"""Damage the files a job reads, one at a time, and do the job again: python fuzz_doors.py DOOR TRIALS [SEED]

Every trial is a child of its own with a time limit, forked before Arrow, DuckDB or torch have started a thread, so
that a crash in C++ or a hang is seen as such. Prints one JSON object: how many trials were done right, were refused
in a sentence, and what else happened (`bad`).

DOOR is manifest, footer (of a manifest), plan, ledger, part (a finished batch), rejected or job.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fake_model import FakeModel
from test_run import data_files, do, ids_written, manifest, rows, settings

from fluxbatch import config
from fluxbatch.command import sentence
from fluxbatch.compose import with_config
from fluxbatch.errors import FluxbatchError
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output.repair import repair
from fluxbatch.output.verify import verify
from fluxbatch.plan.planner import survey
from fluxbatch.storage.folder import RunFolder

PATIENCE_S = 60
DONE, REFUSED, BAD = 0, 3, 9


def mutated(content: bytes, pick: random.Random, *, first: int = 0) -> bytes:
    """One to four changes of `content`, all from `first` on."""
    data = bytearray(content)
    for _ in range(pick.randint(1, 4)):
        at = pick.randrange(first, max(first + 1, len(data)))
        length = pick.choice((1, 2, 4, 8, 64, 512))
        kind = pick.randrange(7)
        if kind == 0:
            data[at : at + 1] = bytes([data[at] ^ (1 << pick.randrange(8))]) if at < len(data) else b""
        elif kind == 1:
            data[at : at + length] = pick.randbytes(length)
        elif kind == 2:
            data[at : at + length] = bytes(length) if pick.random() < 0.5 else b"\xff" * length
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[max(0, at - length) : at]
        elif kind == 5:
            del data[at:]
        else:
            data[at : at + 4] = pick.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
    return bytes(data)


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """How a child that does `work` ends: DONE, REFUSED, BAD or minus the number of a signal; and its words."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE_S)
        os._exit(_outcome(work, writing))
    os.close(writing)
    with os.fdopen(reading, "rb") as words:
        text = words.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def _outcome(work: Callable[[], object], writing: int) -> int:
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    try:
        work()
        return DONE
    except FluxbatchError as error:
        told = sentence(error)
        os.write(writing, told.encode()[:4000])
        return REFUSED if told and len(told) < 2000 else BAD
    except BaseException:
        os.write(writing, traceback.format_exc().encode()[-4000:])
        return BAD


# --- the doors --------------------------------------------------------------------------------------------------------


def _surveyed(base: Path) -> None:
    """What `plan` does, and every row of it is read."""

    def task(cfg: config.JobConfig) -> int:
        survey(open_manifest(cfg.manifest), config.row_rules(cfg), cfg)
        return 0

    with_config(settings(base), task)


def _goes_on(base: Path) -> None:
    """The run ends with the right files, and verify agrees, at the latest after what it says was done.

    A ledger line with another digest is nobody's fault but the disk's: `verify --repair` clears the way.
    """
    do(settings(base))
    if repair(RunFolder(base / "run"), decode=False):
        do(settings(base))
    expected = json.loads((base / "expected.json").read_text())
    assert data_files(base / "run") == expected["files"], "other bytes than an uninterrupted run"
    assert sorted(ids_written(base / "run")) == expected["ids"]
    counts, found = verify(RunFolder(base / "run"), decode=False)
    assert counts.balanced and not found, found


def _prepare(base: Path, *, finished: bool) -> None:
    """A finished run, or one that failed with some batches of an open shard on the disk (serial: always the same)."""
    manifest(base / "m.parquet", [*rows(25), {"id": "bad", "prompt": None}])
    do(settings(base))
    expected = {"files": data_files(base / "run"), "ids": sorted(ids_written(base / "run"))}
    (base / "expected.json").write_text(json.dumps(expected))
    if not finished:
        shutil.rmtree(base / "run")
        try:
            do(settings(base, "pipeline=serial"), lambda: FakeModel(fail_at={"decode": 6}))
        except RuntimeError:
            return
        raise AssertionError("the model was to fail")


DOORS: dict[str, tuple[str, bool, Callable[[Path], None]]] = {  # what is damaged, in a finished run?, what is done then
    "manifest": ("m.parquet", True, _surveyed),
    "footer": ("m.parquet", True, _surveyed),
    "plan": ("run/plan.parquet", False, _goes_on),
    "ledger": ("run/ledger/rank-00000.jsonl", True, _goes_on),
    "part": ("run/batches/*/batch-*.arrow", False, _goes_on),
    "rejected": ("run/rejected.parquet", True, _goes_on),
    "job": ("run/job.json", True, _goes_on),
}


def footer_start(content: bytes) -> int:
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def main(door: str, trials: int, seed: int) -> None:
    pattern, finished, work = DOORS[door]
    outcomes: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        base, trial = Path(scratch) / "base", Path(scratch) / "trial"
        base.mkdir()
        code, words = in_child(lambda: _prepare(base, finished=finished))
        assert code == DONE, words
        for number in range(seed, seed + trials):
            pick = random.Random(f"{door} {number}")
            shutil.copytree(base, trial, symlinks=True)  # with its times: an untouched file is not read again
            victim = pick.choice(sorted(trial.glob(pattern)))
            content = victim.read_bytes()
            damaged = mutated(content, pick, first=footer_start(content) if door == "footer" else 0)
            victim.write_bytes(damaged)
            code, words = in_child(lambda: work(trial))
            outcomes["done" if code == DONE else "refused" if code == REFUSED else "bad"] += 1
            if code not in (DONE, REFUSED):
                bad.append(f"trial {number}: {code}: {words[-1500:]}")
                print(bad[-1], file=sys.stderr, flush=True)
            shutil.rmtree(trial)
    print(json.dumps({"door": door, "trials": trials, **outcomes, "bad": bad}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
