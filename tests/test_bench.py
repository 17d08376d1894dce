"""Each benchmark runs at a small size and ends with one JSON line, so that its figures can be made again."""

import json
import subprocess
import sys
from typing import Any

import pytest

CASES = {
    "host": ["--rows", "40", "--height", "64", "--width", "64"],
    "pipelines": ["model=tiny", "--rows", "3", "--steps", "1", "--batch-size", "2", "--sizes", "64x64"],
    "plan_scale": ["--rows", "2000"],
}


@pytest.mark.parametrize("name", CASES)
def test_the_benchmark_ends_with_one_json_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"fluxbatch.bench.{name}", *CASES[name]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    expected = {"host": ("images", 40), "pipelines": ("equal_bytes", True), "plan_scale": ("rows", 2000)}[name]
    assert figures[expected[0]] == expected[1]
