"""Clocks around work, the GPU's own numbers meanwhile, and tables. Knows no model and no question.

On a GPU work is timed between CUDA events after a warm-up; on a CPU by a monotonic clock. Figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from fluxbatch.config import JobConfig
from fluxbatch.models import loading
from fluxbatch.telemetry.metrics import GpuSampler

GIB = 2**30
SAMPLE_S = 0.2


def device_of(cfg: JobConfig) -> torch.device:
    return loading.place(cfg.model).device


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Give back to the device what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_gib(device: torch.device) -> float | None:
    """Of all tensors since `reset_peak`; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / GIB, 2) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def timed_ms(
    work: Callable[[], Any], *, device: torch.device, repeats: int = 10, calls: int = 1, warm_up: int = 2
) -> float:
    """Median milliseconds of one call, over `repeats` readings of `calls` calls each, after `warm_up` calls."""
    for _ in range(warm_up):
        work()
    readings = _cuda_ms if device.type == "cuda" else _host_ms
    return statistics.median(readings(work, repeats, calls)) / calls


def _host_ms(work: Callable[[], Any], repeats: int, calls: int) -> list[float]:
    readings = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        for _ in range(calls):
            work()
        readings.append((time.perf_counter() - start_s) * 1e3)
    return readings


def _cuda_ms(work: Callable[[], Any], repeats: int, calls: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        for _ in range(calls):
            work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


class Limit:
    """The time this benchmark may take; without one there is always time left."""

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def left_s(self) -> float:
        return float("inf") if self._end_s is None else self._end_s - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left_s() <= 0


class GpuWatch:
    """Clocks, power, temperature and use of the GPU during a block, from NVML, on a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        self._sampler = GpuSampler(device.type == "cuda", uuid)
        self._samples: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-gpu-watch", daemon=True)

    def __enter__(self) -> GpuWatch:
        self._sampler.__enter__()
        self._sampler.sample()  # joules count from here
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._samples.append(self._sampler.sample())
        self._sampler.__exit__(kind, error, traceback)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._samples.append(self._sampler.sample())

    def figures(self) -> dict[str, Any]:
        """Means over the block, the hottest temperature and the energy of it; None where NVML cannot say."""
        columns = {name: [s[name] for s in self._samples if s[name] is not None] for name in self._samples[0]}
        mean = {name: round(statistics.fmean(values), 1) if values and name != "gpu_uuid" else None
                for name, values in columns.items()}  # fmt: skip
        return {
            "power_w": mean["gpu_power_w"],
            "sm_clock_mhz": mean["gpu_sm_clock_mhz"],
            "busy_percent": mean["gpu_utilization_percent"],
            "temperature_c": max(columns["gpu_temperature_c"], default=None),
            "joules": round(sum(columns["gpu_joules"]), 1) if columns["gpu_joules"] else None,
        }


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, header: bool = True) -> None:
    """Print rows under their columns, as they come: widths follow from the column names."""
    if header:
        print("  ".join(_cell(name, name) for name in columns), flush=True)
    for row in rows:
        print("  ".join(_cell(name, row.get(name)) for name in columns), flush=True)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    text = "-" if value is None else str(value)
    width = max(len(name), 8)
    return text.ljust(max(width, 20)) if name in ("what", "name", "size") else text.rjust(width)


def parse_size(text: str) -> tuple[int, int]:
    """HEIGHTxWIDTH, in pixels."""
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise argparse.ArgumentTypeError(f"must be HEIGHTxWIDTH, got {text!r}")
    return int(height), int(width)
