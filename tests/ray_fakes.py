"""The fake model on the workers of a Ray cluster, and how it misbehaves there; imported by the workers too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_model import FakeModel

from fluxbatch.config import JobConfig
from fluxbatch.models import Tokens
from fluxbatch.processes.ranks import Rank


class Marking(FakeModel):
    """Leaves a file PID for its worker after `mark_at` batches; with `hold` it stays there until a file `go` comes.

    A prompt with the word poison raises an error; one with the word deadly ends the worker's process.
    """

    marks: Path
    mark_at: int
    hold: bool

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        if any("deadly" in prompt for prompt in prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("poison" in prompt for prompt in prompts):
            raise RuntimeError("poisoned")
        return super().tokenize(prompts)

    def decode(self, *arguments: Any, **options: Any) -> Any:
        if self.calls["decode"] == self.mark_at:
            (self.marks / str(os.getpid())).touch()
            while self.hold and not (self.marks / "go").exists():
                time.sleep(0.05)
        return super().decode(*arguments, **options)


def load(cfg: JobConfig, rank: Rank, *, marks: str, mark_at: int = 1, hold: bool = False) -> Marking:
    return _made(Marking(), marks, mark_at, hold)


def _made(model: Marking, marks: str, mark_at: int, hold: bool) -> Marking:
    model.marks, model.mark_at, model.hold = Path(marks), mark_at, hold
    return model


class Forgiving(Marking):
    """The same, and nothing harms it."""

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        return FakeModel.tokenize(self, prompts)


def load_forgiving(cfg: JobConfig, rank: Rank, *, marks: str) -> Marking:
    return _made(Forgiving(), marks, mark_at=1, hold=False)


def load_nothing(cfg: JobConfig, rank: Rank, *, marks: str) -> Marking:
    (Path(marks) / f"tried-{os.getpid()}").touch()
    raise FileNotFoundError(2, "No such file or directory", "/models/gone/model.safetensors")
