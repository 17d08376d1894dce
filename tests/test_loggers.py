"""TensorBoard, Weights & Biases and MLflow: asked for by name, offline, and never in a job's way."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxbatch.config import JobConfig, TelemetryConfig
from fluxbatch.errors import ConfigError
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry import loggers
from fluxbatch.telemetry.loggers import Loggers, require_loggers

LINE = {
    "time": "2026-01-31T06:00:00+00:00", "rank": 0, "batch": 7, "bucket": "64x64-4", "images_per_s": 3.5,
    "gpu_power_w": None, "first_of_shape": True, "rows_ok": 4,
}  # fmt: skip
NUMBERS = {"images_per_s": 3.5, "rows_ok": 4.0}


def job(*names: str) -> JobConfig:
    cfg = JobConfig(telemetry=TelemetryConfig(loggers=list(names)))
    cfg.run.name = "night"
    return cfg


class Recorder:
    def __init__(self, *, fail_at: int | None = None) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._fail_at = fail_at

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if step == self._fail_at:
            raise ConnectionError("the service is away")
        self.seen.append((step, numbers))

    def close(self) -> None:
        self.closed += 1


def test_the_numbers_of_a_line_are_logged_by_batch_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setitem(loggers.OPEN, "wandb", lambda cfg, folder, rank: recorder)
    with Loggers(job("wandb"), RunFolder(tmp_path), rank=0) as open_ones:
        open_ones.log(LINE)
        open_ones.log(LINE)
    assert recorder.seen == [(0, NUMBERS), (1, NUMBERS)] and recorder.closed == 1


def test_a_logger_that_fails_is_told_once_left_out_and_takes_nobody_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Recorder(fail_at=1), Recorder()

    def refuse(cfg: Any, folder: Any, rank: int) -> Any:
        raise PermissionError("no login")

    for name, make in {"wandb": lambda *_: broken, "mlflow": lambda *_: sound, "tensorboard": refuse}.items():
        monkeypatch.setitem(loggers.OPEN, name, make)
    with Loggers(job("tensorboard", "wandb", "mlflow"), RunFolder(tmp_path), rank=0) as open_ones:
        for _ in range(4):
            open_ones.log(LINE)
    assert [step for step, _ in broken.seen] == [0] and len(sound.seen) == 4 and sound.closed == 1
    assert [record.message.split(":")[1].split()[0] for record in caplog.records] == ["tensorboard", "wandb"]


def test_a_package_that_is_missing_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loggers.PACKAGES, "wandb", "no_such_package_anywhere")
    with pytest.raises(ConfigError, match=r"got wandb, which is not: pip install 'fluxbatch\[wandb\]'"):
        require_loggers(["wandb"])
    require_loggers([])


def test_an_unknown_logger_is_refused_at_the_door() -> None:
    from test_config import composed

    with pytest.raises(ConfigError, match=r"telemetry\.loggers must be a list of tensorboard, wandb, mlflow"):
        composed("manifest.path=m.parquet", "telemetry.loggers=[tensorboard,papyrus]")


def test_wandb_stays_offline_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def init(**kwargs: Any) -> Any:
        asked.append(kwargs)
        return SimpleNamespace(log=lambda numbers, step: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for mode in ("offline", "online"):
        with Loggers(job("wandb"), RunFolder(tmp_path), rank=1) as open_ones:
            open_ones.log(LINE)
        assert (asked[-1]["mode"], asked[-1]["name"], asked[-1]["group"]) == (mode, "night-rank-1", "night")
        monkeypatch.setenv("WANDB_MODE", "online")
    assert "manifest" not in asked[0]["config"] and "model" not in asked[0]["config"], "no URL with a password in it"


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Loggers(job("tensorboard"), RunFolder(tmp_path), rank=0) as open_ones:
        open_ones.log(LINE)
        open_ones.log(LINE | {"images_per_s": 4.0})
    found = reader.EventAccumulator(str(tmp_path / "logs" / "tensorboard" / "rank-00000")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("images_per_s")] == [(0, 3.5), (1, 4.0)]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_the_real_package_takes_a_line_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(name)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with Loggers(job(name), RunFolder(tmp_path), rank=0) as open_ones:
        open_ones.log(LINE)
    assert not [record for record in caplog.records if "left out" in record.message]
    assert any((tmp_path / "logs").iterdir())
