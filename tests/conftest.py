"""Folders of tiny random models, saved once, and the `faults` fixture.

`faults`: a test that does to a job what the world does says what it did, and the session ends with sums.

A test that asks for it carries the marker `faults` by itself; `make faults` runs those, the slow ones too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from forge import Forge, forge
from quick_settings import read_quickly

read_quickly()

COUNTED = (
    "kills",
    "signals",
    "hangs",
    "disks filled",
    "races",
    "fuzz inputs",
    "rows checked",
    "rows lost",
    "rows doubled",
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a job remembers is for its test alone, and never in the user's cache."""
    monkeypatch.setenv("FLUXBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))


class Faults:
    """What was done to jobs, and what became of their rows."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def kill(self, number: int = 1) -> None:
        """A process that got SIGKILL, or ended as one does."""
        self.counts["kills"] += number

    def signal(self, number: int = 1) -> None:
        """A signal that a process may answer."""
        self.counts["signals"] += number

    def hang(self, number: int = 1) -> None:
        self.counts["hangs"] += number

    def disk(self, number: int = 1) -> None:
        """A disk that was full, read-only or gone."""
        self.counts["disks filled"] += number

    def race(self, number: int = 1) -> None:
        """Two owners of one folder."""
        self.counts["races"] += number

    def fuzz(self, number: int) -> None:
        """Inputs that were damaged."""
        self.counts["fuzz inputs"] += number

    def rows(self, *, asked: Iterable[str], found: Iterable[str]) -> None:
        """Every id that was asked for stands in the output once, and no other does."""
        wanted, there = Counter(list(asked)), Counter(list(found))
        lost, doubled = wanted - there, there - wanted
        self.counts["rows checked"] += wanted.total()
        self.counts["rows lost"] += lost.total()
        self.counts["rows doubled"] += doubled.total()
        assert not lost, f"lost: {sorted(lost)[:5]}"
        assert not doubled, f"there twice, or never asked for: {sorted(doubled)[:5]}"


SUMS = pytest.StashKey[Faults]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMS] = Faults()
    # The processes that tests start must run this checkout, not whichever one is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "faults" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.faults)


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    return request.config.stash[SUMS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[SUMS].counts
    if counts:
        terminalreporter.write_sep("-", "faults")
        terminalreporter.write_line(", ".join(f"{name} {counts[name]}" for name in COUNTED))


@pytest.fixture(scope="session")
def flux1_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX.1 of random weights in diffusers' layout. Read only."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline  # only where it is asked for: seconds
    from tiny_models import FLUX1_SCHEDULER, flux1_parts

    folder = tmp_path_factory.mktemp("flux1") / "base"
    FluxPipeline(**flux1_parts(), scheduler=FlowMatchEulerDiscreteScheduler(**FLUX1_SCHEDULER)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def flux2_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX.2-klein of random weights in diffusers' layout. Read only."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
    from tiny_models import FLUX2_SCHEDULER, flux2_parts

    folder = tmp_path_factory.mktemp("flux2") / "base"
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX2_SCHEDULER)
    Flux2KleinPipeline(**flux2_parts(), scheduler=scheduler, is_distilled=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts the real command as processes that have everything imported already."""
    with forge(tmp_path_factory.mktemp("forge")) as made:
        yield made
