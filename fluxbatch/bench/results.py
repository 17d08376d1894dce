"""What a result file holds beside its figures: hardware, versions, settings, commit. Measures nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fluxbatch.bench.measure import GIB, device_of
from fluxbatch.config import JobConfig
from fluxbatch.output.job import settings_record
from fluxbatch.storage.commit import replace_file

log = logging.getLogger(__name__)

LIBRARIES = ("fluxbatch", "torch", "triton", "diffusers", "transformers", "torchao", "cache-dit", "pillow", "pyarrow")
NOT_SETTINGS = ("results", "no_results", "commit", "json", "folder")


class Result:
    """Owns one result file, written anew each time more is known, so that an interrupted run keeps what it has."""

    def __init__(self, what: str, cfg: JobConfig, options: argparse.Namespace) -> None:
        started = datetime.now(UTC)
        machine = hardware(device_of(cfg))
        self._head = {
            "bench": what,
            "started": started.isoformat(timespec="seconds"),
            "hardware": machine,
            "versions": versions(),
            "commit": options.commit or _git_commit(),
            "settings": _settings(cfg),
            "options": {key: value for key, value in vars(options).items() if key not in NOT_SETTINGS},
        }
        gpu = re.sub(r"\W+", "-", machine["gpu"] or "cpu").lower()
        name = f"{what}-{gpu}-{started:%Y%m%d-%H%M%S}.json"
        self.path: Path | None = None if options.no_results else options.results / name

    def described(self, figures: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, **figures}

    def keep(self, figures: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(self.described(figures), default=str, indent=1)
            replace_file(self.path, content.encode() + b"\n")
        except OSError as error:  # the measurement is worth more than its file
            log.warning("%s: %s; the figures are printed only", self.path, error.strerror)
            self.path = None


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine in words, no name or address of it."""
    described: dict[str, Any] = {"gpu": None, "cpu": _cpu(), "cores": len(os.sched_getaffinity(0))}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / GIB, 1)}
        described |= _nvml(str(properties.uuid))
    return described


def _nvml(uuid: str) -> dict[str, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1000
        return {"driver": str(pynvml.nvmlSystemGetDriverVersion()), "power_limit_w": limit_w}
    except Exception as error:  # no driver or library, or a slice of a card
        return {"nvml": str(error)}


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def versions() -> dict[str, str | None]:
    known = {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return known | {"cuda": torch.version.cuda, "cudnn": str(cudnn) if cudnn else None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """HEAD, with `+` where the checkout has changes of its own; None where this is no checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _settings(cfg: JobConfig) -> dict[str, Any]:
    others = {
        "plan.batch_size": cfg.plan.batch_size,
        "pipeline.mode": cfg.pipeline.mode,
        "pipeline.depth": cfg.pipeline.depth,
        "pipeline.compress_workers": cfg.pipeline.compress_workers,
        "model.decode_max_pixels": cfg.model.decode_max_pixels,
    }
    return {
        key: value for key, value in settings_record(cfg).items() if key not in ("model.path", "model.base")
    } | others
