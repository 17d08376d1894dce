"""One JSON line a batch, what the GPU drew meanwhile, and a Prometheus text file. Knows nothing of images or shards.

Durations come from monotonic clocks; the calendar clock only stamps the line. Every line has the same keys, and a
number that is unknown or not finite is null. Telemetry never stops a job: NVML may be absent, of another make or
broken, and then the GPU fields are null.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from fluxbatch import process
from fluxbatch.records import CompressedBatch, StageTimes
from fluxbatch.storage.commit import replace_file
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lines import append
from fluxbatch.storage.objects import ObjectPath

log = logging.getLogger(__name__)

STAGES = ("prefetch", "encode", "denoise", "decode", "transfer", "compress")
OBJECT_LOG_S = 30.0  # of batch log in one object
HANDOVERS = ("prefetch->launch", "launch->transfer", "transfer->compress", "compress->commit")
GPU_FIELDS = (
    "gpu_uuid",
    "gpu_utilization_percent",
    "gpu_memory_used_gib",
    "gpu_power_w",
    "gpu_sm_clock_mhz",
    "gpu_temperature_c",
    "gpu_joules",
)

READINGS: dict[str, Callable[[Any, Any], float]] = {
    "gpu_utilization_percent": lambda nvml, card: nvml.nvmlDeviceGetUtilizationRates(card).gpu,
    "gpu_memory_used_gib": lambda nvml, card: nvml.nvmlDeviceGetMemoryInfo(card).used / 2**30,
    "gpu_power_w": lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
    "gpu_sm_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
    "gpu_temperature_c": lambda nvml, card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
}


class GpuSampler:
    """NVML's view of one card, the one whose UUID torch names; every other card's numbers are refused.

    An index would not do: CUDA and NVML number the cards differently. A slice of a card (MIG) has no numbers of
    its own.
    """

    def __init__(self, enabled: bool, uuid: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._uuid = _bare_uuid(uuid) if enabled and uuid else None
        self._clock = clock
        self._nvml: Any = None
        self._card: Any = None
        self._warned = False
        self._energy_j: float | None = None
        self._sampled_s = clock()

    def __enter__(self) -> GpuSampler:
        if self._uuid is None:
            return self
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._card = _find_card(self._nvml, self._uuid)
            self._energy_j, self._sampled_s = self._total_energy_j(), self._clock()
        except Exception as error:  # no driver, no library, another library of the same name
            self._warn(error)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._card is None:
            return
        self._card = None
        try:
            self._nvml.nvmlShutdown()
        except Exception as error:
            self._warn(error)

    def sample(self) -> dict[str, Any]:
        """The `gpu_*` fields now; `gpu_joules` since the sample before. Null where NVML cannot say."""
        fields: dict[str, Any] = dict.fromkeys(GPU_FIELDS)
        if self._card is None:
            return fields
        fields["gpu_uuid"] = f"GPU-{self._uuid}"
        for name, read in READINGS.items():
            fields[name] = self._reading(read)
        fields["gpu_joules"] = self._joules(fields["gpu_power_w"])
        return fields

    def _reading(self, read: Callable[[Any, Any], float]) -> float | None:
        try:
            return finite(float(read(self._nvml, self._card)))
        except Exception as error:  # a function that this card, driver or library lacks
            self._warn(error)
            return None

    def _total_energy_j(self) -> float | None:
        return self._reading(lambda nvml, card: nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000)

    def _joules(self, power_w: float | None) -> float | None:
        """The card's own energy counter; where it has none or was reset, power times time."""
        energy_j, now_s = self._total_energy_j(), self._clock()
        before_j, before_s = self._energy_j, self._sampled_s
        self._energy_j, self._sampled_s = energy_j, now_s
        if energy_j is not None and before_j is not None and energy_j >= before_j:
            return finite(energy_j - before_j)
        return None if power_w is None else finite(power_w * (now_s - before_s))

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning("GPU telemetry is incomplete: %s: %s", type(error).__name__, error)
        self._warned = True


def _bare_uuid(uuid: str | bytes) -> str:
    """`GPU-8b6f...` and torch's `8b6f...` alike; `MIG-...` stays itself and so matches no card."""
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text.strip().removeprefix("GPU-").lower()


def _find_card(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the card with this UUID. Raises LookupError where there is none, or where it is divided."""
    for index in range(nvml.nvmlDeviceGetCount()):
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        if _bare_uuid(nvml.nvmlDeviceGetUUID(card)) == uuid:
            if _is_sliced(nvml, card):
                raise LookupError(f"GPU-{uuid} is divided (MIG); NVML would tell the neighbours' numbers")
            return card
    raise LookupError(f"NVML lists no card with the UUID {uuid}")


def _is_sliced(nvml: Any, card: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(card)[0])
    except Exception:  # cards that cannot be divided do not know the question
        return False


class MetricsLog:
    """The batch log of one rank: `logs/metrics-rank-00000.jsonl`, appended, one writer."""

    def __init__(self, folder: RunFolder, rank: int, gpu: GpuSampler) -> None:
        self._path = folder.metrics(rank)
        self._rank = rank
        self._gpu = gpu
        self._held: list[str] = []
        self._written_s = time.monotonic()
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def record(self, done: CompressedBatch, *, wall_s: float) -> dict[str, Any]:
        """Append one batch's line and return it. `wall_s`: since this rank finished the batch before."""
        line = batch_line(done, rank=self._rank, wall_s=wall_s) | self._gpu.sample()
        self._held.append(json.dumps(line, allow_nan=False) + "\n")
        if not isinstance(self._path, ObjectPath) or time.monotonic() - self._written_s >= OBJECT_LOG_S:
            self.flush()
        return line

    def flush(self) -> None:
        """Write down what is held: on an object store each write is an object."""
        if self._held:
            append(self._path, "".join(self._held), durable=False)  # a crash may shorten a log
        self._held, self._written_s = [], time.monotonic()


def record_start(folder: RunFolder, rank: int, *, gpu: str | None, rows_done: int, batches_to_make: int) -> None:
    """One line for a start that has something to draw: what stood there already, and on what the rest is drawn."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    line = {"time": _now(), "rank": rank, "host": process.host(), "job": os.environ.get("SLURM_JOB_ID"), "gpu": gpu}
    line |= {"rows_done": rows_done, "batches_to_make": batches_to_make}
    append(folder.starts(rank), json.dumps(line) + "\n", durable=False)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def batch_line(done: CompressedBatch, *, rank: int, wall_s: float) -> dict[str, Any]:
    """What one batch did, without the GPU. `images_per_s` counts written images only, never padding or failed rows."""
    plan, bucket = done.batch.plan, done.batch.bucket
    return {
        "time": _now(),
        "rank": rank,
        "shard": plan.shard,
        "batch": plan.index,
        "bucket": bucket.name,
        "height": bucket.height,
        "width": bucket.width,
        "num_inference_steps": bucket.num_inference_steps,
        "rows_ok": done.num_ok,
        "rows_failed": done.num_failed,
        "rows_padded": done.batch.num_padded,
        **_times(done.times),
        "wall_s": finite(wall_s, digits=6),
        "images_per_s": rate(done.num_ok, wall_s),
        "first_of_shape": done.times.first_of_shape,
        "out_of_memory_splits": done.times.out_of_memory_splits,
        "peak_allocated_gib": finite(done.times.peak_allocated_gib),
        "peak_reserved_gib": finite(done.times.peak_reserved_gib),
    }


class PeakMemory:
    """The most that the launches of each bucket needed on the GPU."""

    def __init__(self) -> None:
        self._gib: dict[str, tuple[float, float]] = {}

    def add(self, done: CompressedBatch) -> None:
        allocated_gib, reserved_gib = done.times.peak_allocated_gib, done.times.peak_reserved_gib
        if allocated_gib is not None and reserved_gib is not None:
            before = self._gib.get(done.batch.bucket.name, (0.0, 0.0))
            self._gib[done.batch.bucket.name] = max(before[0], allocated_gib), max(before[1], reserved_gib)

    def say(self) -> None:
        for bucket, (allocated_gib, reserved_gib) in self._gib.items():
            log.info("peak GPU memory, %s: %.2f GiB allocated, %.2f reserved", bucket, allocated_gib, reserved_gib)


def wait_key(handover: str) -> str:
    """The log's key for the time that a hand-over's receiver stood idle."""
    return f"wait_{handover.replace('->', '_')}_ms"


def _times(times: StageTimes) -> dict[str, float | None]:
    stages = {f"{stage}_ms": finite(getattr(times, f"{stage}_ms")) for stage in STAGES}
    waits = {wait_key(name): finite(times.wait_ms.get(name)) for name in HANDOVERS}
    return stages | waits


def finite(value: float | None, *, digits: int = 3) -> float | None:
    """The number rounded for the log, or None where strict JSON has no word for it."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def rate(images: int, wall_s: float) -> float | None:
    """Images a second; None where no time passed."""
    return finite(images / wall_s, digits=4) if wall_s > 0 else None


SUCCESS_METRIC = "fluxbatch_last_success_timestamp_seconds"
PROMETHEUS = (  # metric, help, key of the status
    ("fluxbatch_images_per_second", "Written images a second over the last batches.", "images_per_s"),
    (
        "fluxbatch_gpu_busy_ratio",
        "Share of the time that the GPUs were in use, over the last batches.",
        "gpu_busy_share",
    ),
    ("fluxbatch_gpu_power_watts", "Mean power of a GPU over the last batches.", "gpu_power_w"),
    ("fluxbatch_eta_seconds", "Time until the last row, at the present rate.", "eta_s"),
    ("fluxbatch_last_commit_timestamp_seconds", "Unix time of the last committed batch.", "last_commit"),
    ("fluxbatch_seconds_since_last_commit", "Age of the last committed batch when this was written.", "commit_age_s"),
    (SUCCESS_METRIC, "Unix time when a job that writes this file was complete last.", "last_success"),
    ("fluxbatch_running_processes", "Live processes that work on this job.", "processes"),
    ("fluxbatch_complete", "1 when no row is pending.", "complete"),
)


def write_prometheus(path: str | Path, status: dict[str, Any]) -> None:
    """Replace a file for node_exporter's textfile collector by `report.status`'s numbers; unknown ones are left out.

    The time of the last success outlives a run that has not succeeded yet: alerts ask how long ago it was.
    """
    label = f'run="{_escaped_label(status["run"])}"'
    lines = ["# HELP fluxbatch_rows Manifest rows by what became of them.", "# TYPE fluxbatch_rows gauge"]
    lines += [
        f'fluxbatch_rows{{{label},state="{state}"}} {status[state]}'
        for state in ("written", "failed", "rejected", "pending")
    ]
    known = status | {
        "last_success": status["last_success"] or _last_success(Path(path)),
        "commit_age_s": time.time() - _number(status["last_commit"]) if status["last_commit"] else None,
        "processes": len(status["running"]),
    }
    for metric, text, key in PROMETHEUS:
        if known[key] is not None:
            value = _number(known[key])
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge", f"{metric}{{{label}}} {value}"]
    replace_file(Path(path), ("\n".join(lines) + "\n").encode())


def _last_success(path: Path) -> float | None:
    """What the file said before."""
    try:
        lines = path.read_text().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{SUCCESS_METRIC}{{")), None)
    except (OSError, ValueError):
        return None


def _number(value: float | str) -> float:
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)


def _escaped_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
