"""The batch log's numbers to TensorBoard, Weights & Biases or MLflow, where somebody asks for it. Knows no images.

Each is imported where it is opened and is an extra of its own. None of them goes to the network unless the
environment says so, and one that fails is told once and left out: telemetry never stops a job.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

from fluxbatch.config import JobConfig, run_name
from fluxbatch.errors import ConfigError
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
NOT_LOGGED = {"rank", "shard", "batch"}  # numbers that say where, not how much
Numbers = Mapping[str, float]


class Logger(Protocol):
    """Takes the numbers of one batch; `step` counts the batches of this process."""

    def log(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files under logs/tensorboard/."""

    def __init__(self, cfg: JobConfig, folder: RunFolder, rank: int) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder.logs / "tensorboard" / f"rank-{rank:05d}"))

    def log(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Offline, under logs/wandb/ (`wandb sync` sends it), unless WANDB_MODE says otherwise."""

    def __init__(self, cfg: JobConfig, folder: RunFolder, rank: int) -> None:
        wandb = importlib.import_module("wandb")
        name = run_name(cfg)
        folder.logs.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project="fluxbatch",
            group=name,
            name=f"{name}-rank-{rank}",
            dir=str(folder.logs),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={key: value for key, value in asdict(cfg).items() if key in ("sampler", "plan", "pipeline")},
        )

    def log(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """A database under logs/, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, cfg: JobConfig, folder: RunFolder, rank: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        folder.logs.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.logs}/mlflow.db"
        self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment("fluxbatch")
        self._mlflow.start_run(run_name=f"{run_name(cfg)}-rank-{rank}")

    def log(self, step: int, numbers: Numbers) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


OPEN: dict[str, Callable[[JobConfig, RunFolder, int], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def require_loggers(names: list[str]) -> None:
    """ConfigError that names the extra of a logger that is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"telemetry.loggers must be installed, got {name}, which is not: pip install 'fluxbatch[{name}]'"
            )


class Loggers:
    """Those of `telemetry.loggers`, open while the context is."""

    def __init__(self, cfg: JobConfig, folder: RunFolder, *, rank: int) -> None:
        self._cfg, self._folder, self._rank = cfg, folder, rank
        self._open: dict[str, Logger] = {}
        self._step = 0

    def __enter__(self) -> Loggers:
        for name in self._cfg.telemetry.loggers:
            with self._spared(name):
                self._open[name] = OPEN[name](self._cfg, self._folder, self._rank)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for name, logger in list(self._open.items()):
            with self._spared(name):
                logger.close()

    def log(self, line: Mapping[str, Any]) -> None:
        """One batch, given as its line of the batch log: what is a number in it."""
        numbers = {key: float(value) for key, value in line.items() if _is_number(value) and key not in NOT_LOGGED}
        for name, logger in list(self._open.items()):
            with self._spared(name):
                logger.log(self._step, numbers)
        self._step += 1

    @contextlib.contextmanager
    def _spared(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a service, its disk or its client comes up with
            self._open.pop(name, None)
            log.warning("telemetry.loggers: %s is left out from here on: %s: %s", name, type(error).__name__, error)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
