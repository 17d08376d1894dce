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
from fluxbatch.ranks import Rank


class Marking(FakeModel):
    """Leaves a file PID for its worker when it has drawn `mark_at` batches, and takes `slow_s` for each launch.

    A prompt with the word poison raises an error; one with the word deadly ends the worker's process.
    """

    marks: Path
    slow_s: float
    mark_at: int

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        if any("deadly" in prompt for prompt in prompts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("poison" in prompt for prompt in prompts):
            raise RuntimeError("poisoned")
        return super().tokenize(prompts)

    def decode(self, *arguments: Any, **options: Any) -> Any:
        if self.calls["decode"] == self.mark_at:
            (self.marks / str(os.getpid())).touch()
        time.sleep(self.slow_s)
        return super().decode(*arguments, **options)


def load(cfg: JobConfig, rank: Rank, *, marks: str, slow_s: float = 0.0, mark_at: int = 1) -> Marking:
    model = Marking()
    model.marks, model.slow_s, model.mark_at = Path(marks), slow_s, mark_at
    return model


class Forgiving(Marking):
    """The same, and nothing harms it."""

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        return FakeModel.tokenize(self, prompts)


def load_forgiving(cfg: JobConfig, rank: Rank, *, marks: str) -> Marking:
    model = Forgiving()
    model.marks, model.slow_s, model.mark_at = Path(marks), 0.0, 1
    return model


def load_nothing(cfg: JobConfig, rank: Rank, *, marks: str) -> Marking:
    (Path(marks) / f"tried-{os.getpid()}").touch()
    raise FileNotFoundError(2, "No such file or directory", "/models/gone/model.safetensors")
