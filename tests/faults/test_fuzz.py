"""The doors under fire: damaged files and senseless settings end in a right result or in one sentence."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fluxbatch import command, config, config_rules, stop
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import FluxbatchError
from fluxbatch.processes import ranks

HARNESS = Path(__file__).parent / "fuzz_doors.py"
QUICK = {"manifest": 5, "footer": 1, "plan": 1, "ledger": 2, "part": 1, "rejected": 1, "job": 1}


def fuzz(door: str, trials: int, faults, *, seed: int = 0) -> None:
    done = subprocess.run([sys.executable, str(HARNESS), door, str(trials), str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    faults.fuzz(answer["trials"])
    assert not answer["bad"], answer["bad"][:3]
    assert answer.get("refused", 0) + answer.get("done", 0) == trials


@pytest.mark.parametrize(
    "door", [pytest.param(door, marks=() if QUICK[door] > 1 else pytest.mark.slow) for door in QUICK]
)
def test_a_damaged_file_is_refused_in_one_sentence_or_makes_no_difference(door: str, faults) -> None:
    fuzz(door, QUICK[door], faults)


def test_a_footer_that_ended_the_process_inside_arrow_is_refused(faults) -> None:
    """Asked for the size of one column, pyarrow lets a C++ exception out; the planner reads a row first."""
    fuzz("footer", 1, faults, seed=249)


@pytest.mark.slow
@pytest.mark.parametrize("door", QUICK)
def test_many_damaged_files(door: str, faults) -> None:
    fuzz(door, 20 * QUICK[door], faults, seed=1000)


# --- settings ---------------------------------------------------------------------------------------------------------

KEYS = [
    f"{group.name}.{entry.name}"
    for group in dataclasses.fields(JobConfig)
    for entry in dataclasses.fields(group.default_factory)  # type: ignore[arg-type]
]
SENSELESS = [
    "", "null", "nan", "-inf", "1e400", "-1", "0", "1e-9", "true", "[]", "{}", "[1,[2]]", "{a:1}", "'", '"', "${",
    "${x}", "${oc.env:NOWHERE}", "${manifest}", "???", "\\", "a,b", "a=b", "=", "%", "😀", "\0", "\n", "9" * 30,
    "choice(1,2)", "range(3)", "glob(*)", "interval(0,1)", "+1", "~", "@", "2026-01-31T25:00:00+00:00", "+nan",
    "+1e999",
]  # fmt: skip
values = st.one_of(st.sampled_from(SENSELESS), st.text(max_size=12), st.integers().map(str), st.floats().map(str))
keys = st.one_of(st.sampled_from(KEYS), st.sampled_from([key.partition(".")[0] for key in KEYS]), st.text(max_size=8))
overrides = st.tuples(st.sampled_from(["", "+", "++", "~"]), keys, st.just("="), values).map("".join)


def through_the_door(words: list[str]) -> None:
    """What every verb does before it opens a file."""

    def task(cfg: JobConfig) -> int:
        config_rules.check(cfg)
        config.output_dir(cfg)
        config.row_rules(cfg)
        ranks.resolve(cfg.run, {})
        stop.seconds_left(cfg.run.deadline, {})
        return 0

    try:
        with_config(words, task)
    except FluxbatchError as error:
        assert str(error) and len(str(error)) < 2000


@given(st.lists(overrides, min_size=1, max_size=2))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_settings_of_any_text_are_taken_or_refused_in_one_sentence(words: list[str]) -> None:
    through_the_door(words)


@pytest.mark.slow
def test_every_setting_with_every_senseless_value(faults) -> None:
    for key in KEYS:
        for value in SENSELESS:
            through_the_door([f"{key}={value}"])
    faults.fuzz(len(KEYS) * len(SENSELESS))


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=10), max_size=3))
@settings(max_examples=30, deadline=None)
@example(["-m"])
@example(["--cfg"])
@example(["run", "run"])
@example(["=", "=="])
def test_words_of_any_kind_after_the_command_end_in_a_sentence(words: list[str]) -> None:
    """`--cfg` alone is argparse's to refuse, with its usage and 2."""
    try:
        verb, _, rest = command._parse(words)
        if verb in ("plan", "run"):
            through_the_door(rest)
    except FluxbatchError as error:
        assert str(error)
    except SystemExit as end:
        assert end.code in (0, 2)
