"""How many images a launch of each bucket should hold, by measurement; what was measured is kept between jobs.

Decides from numbers. What a launch costs is answered by whoever holds the model: this room knows no tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fluxbatch import __version__
from fluxbatch.config import SPEED_AFFECTING, JobConfig, setting
from fluxbatch.plan.cut import batch_size
from fluxbatch.records import Bucket, LaunchCost
from fluxbatch.storage import commit
from fluxbatch.user_cache import cache_folder

log = logging.getLogger(__name__)

KNEE = 0.015  # what the chosen size may lack of the best one measured: 2 %, less the noise of a measurement
SETTLED_GAIN = 0.02  # of two doublings together; one alone may be unlucky in how its blocks fill the GPU
MAX_IMAGES = 64  # a kill costs the launches in flight
MEASURED_FROM_LAUNCHES = 8  # of the rule's size: a smaller bucket is drawn before its measurement pays


@dataclass(frozen=True, slots=True)
class Curve:
    """What sizes 1, 2, 4, ... cost for images of one shape, and the first size that did not fit into `budget_gib`."""

    costs: tuple[LaunchCost, ...] = ()
    too_large: int | None = None
    budget_gib: float = 0.0

    def within(self, budget_gib: float) -> Curve:
        """What of it holds under another budget."""
        costs = tuple(cost for cost in self.costs if cost.peak_gib <= budget_gib)
        still_too_large = budget_gib <= self.budget_gib * 1.02  # what is free at a start differs a little every time
        return Curve(costs, self.too_large if still_too_large else None, budget_gib)

    @property
    def next_size(self) -> int:
        return 2 * self.costs[-1].size if self.costs else 1

    def is_settled(self, *, num_inference_steps: int, max_size: int) -> bool:
        """Whether no larger size is worth a try."""
        if self.next_size > min(max_size, (self.too_large or max_size + 1) - 1):
            return True
        rates = [cost.images_per_s(num_inference_steps=num_inference_steps) for cost in self.costs]
        return len(rates) > 2 and rates[-1] <= (1 + SETTLED_GAIN) * rates[-3]

    def knee(self, *, num_inference_steps: int) -> int:
        """The smallest size that is about as fast as the best; 1 where nothing fits."""
        rates = {cost.size: cost.images_per_s(num_inference_steps=num_inference_steps) for cost in self.costs}
        return min((size for size, rate in rates.items() if rate >= (1 - KNEE) * max(rates.values())), default=1)


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides speed beside model and shape.

    `budget_gib` bounds the sizes, by their peaks, but is no part of the key: it differs a little at every start.
    """

    gpu: str
    memory_gib: float
    budget_gib: float

    def key(self) -> dict[str, Any]:
        versions = {"torch": version("torch"), "diffusers": version("diffusers"), "fluxbatch": __version__}
        return {"gpu": self.gpu, "memory_gib": self.memory_gib, "versions": versions}


Measure = Callable[[Bucket, int], LaunchCost | None]  # None: it does not fit


class MeasuredSizes:
    """Answers the batch size of a bucket with so many rows: from memory, else by measuring, else by the plan's rule."""

    def __init__(self, cfg: JobConfig, machine: Machine, measure: Measure) -> None:
        self._cfg = cfg
        self._machine = machine
        self._measure = measure

    def __call__(self, bucket: Bucket, num_rows: int) -> int:
        ruled = batch_size(bucket, self._cfg.plan, num_rows=num_rows)
        if num_rows <= ruled:  # one launch in any case
            return ruled
        known = _read(_memory_path(self._cfg, bucket, self._machine))
        curve = (known[1] if known else Curve()).within(self._machine.budget_gib)
        if num_rows > MEASURED_FROM_LAUNCHES * ruled:
            curve = self._grow(curve, bucket, max_size=min(num_rows, self._cfg.plan.shard_size, MAX_IMAGES))
        elif not curve.costs:
            return ruled
        knee = curve.knee(num_inference_steps=bucket.num_inference_steps)
        size = batch_size(bucket, self._cfg.plan, num_rows=num_rows, knee=knee)
        log.info("plan.batch_size=auto: %s on %s: %s", bucket.name, self._machine.gpu, _words(curve, bucket, size))
        return size

    def _grow(self, curve: Curve, bucket: Bucket, *, max_size: int) -> Curve:
        """Measure on, and keep each figure at once: a signal may end the search anywhere."""
        path, key = _memory_path(self._cfg, bucket, self._machine), _key(self._cfg, bucket) | self._machine.key()
        while not curve.is_settled(num_inference_steps=bucket.num_inference_steps, max_size=max_size):
            cost = self._measure(bucket, curve.next_size)
            if cost is None:
                curve = replace(curve, too_large=curve.next_size)
            else:
                curve = replace(curve, costs=(*curve.costs, cost))
            _keep(path, key, curve)
        return curve


def _words(curve: Curve, bucket: Bucket, size: int) -> str:
    rates = [(cost.size, cost.images_per_s(num_inference_steps=bucket.num_inference_steps)) for cost in curve.costs]
    words = ", ".join(f"{tried}: {rate:.4g}" for tried, rate in rates)
    limit = f"; {curve.too_large} do not fit into {curve.budget_gib:.1f} GiB" if curve.too_large else ""
    return f"images/s by batch size {words or 'unknown'}{limit}; batches of {size}"


class RememberedSizes:
    """Answers from what any GPU was measured to do, without asking for one; else by the plan's rule."""

    def __init__(self, cfg: JobConfig) -> None:
        self._cfg = cfg
        self.measured_on: dict[Bucket, str] = {}  # the GPU's name, for buckets that were not answered by the rule

    def __call__(self, bucket: Bucket, num_rows: int) -> int:
        ruled = batch_size(bucket, self._cfg.plan, num_rows=num_rows)
        if self._cfg.plan.batch_size != "auto" or self._cfg.model.device == "cpu" or num_rows <= ruled:
            return ruled
        known = _latest(self._cfg, bucket)
        if known is None or not known[1].costs:
            return ruled
        key, curve = known
        self.measured_on[bucket] = key["gpu"]
        knee = curve.knee(num_inference_steps=bucket.num_inference_steps)
        return batch_size(bucket, self._cfg.plan, num_rows=num_rows, knee=knee)


# The memory: one JSON file for each model, shape and machine.


def _key(cfg: JobConfig, bucket: Bucket) -> dict[str, Any]:
    settings = {name: setting(cfg, name) for name in SPEED_AFFECTING}
    shape = {"height": bucket.height, "width": bucket.width, "negative_pass": bucket.negative_pass}
    return {"settings": settings, **shape}


def _folder() -> Path:
    return cache_folder(os.environ) / "batch_sizes"


def _stem(cfg: JobConfig, bucket: Bucket) -> str:
    shape = f"{bucket.height}x{bucket.width}" + ("-cfg" if bucket.negative_pass else "")
    return re.sub(r"[^\w.-]", "_", f"{cfg.model.name}-{shape}")


def _memory_path(cfg: JobConfig, bucket: Bucket, machine: Machine) -> Path:
    key = json.dumps(_key(cfg, bucket) | machine.key(), sort_keys=True)
    return _folder() / f"{_stem(cfg, bucket)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _latest(cfg: JobConfig, bucket: Bucket) -> tuple[dict[str, Any], Curve] | None:
    """What was measured last for this model and shape, on whatever machine."""
    wanted = _key(cfg, bucket)
    for path in _newest_first(_folder().glob(f"{_stem(cfg, bucket)}-????????????????.json")):
        known = _read(path)
        if known and {name: known[0].get(name) for name in wanted} == wanted:
            return known
    return None


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    try:
        return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except OSError as error:
        log.warning("%s: what was measured before cannot be read: %s", _folder(), error.strerror)
        return []


def _read(path: Path) -> tuple[dict[str, Any], Curve] | None:
    """A key and its curve; None where there is none, or an unreadable one, which is said."""
    try:
        content = json.loads(path.read_bytes())
        costs = tuple(LaunchCost(**cost) for cost in content["costs"])
        if not all(cost.size > 0 and cost.step_s > 0 and cost.decode_s >= 0 for cost in costs):
            raise ValueError("a size or a time is not positive")
        return dict(content["key"]), Curve(costs, content["too_large"], float(content["budget_gib"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: what was measured before cannot be read: %s", path, error)
        return None


def _keep(path: Path, key: dict[str, Any], curve: Curve) -> None:
    content = {"key": key, **asdict(curve)}
    try:
        commit.replace_file(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        log.warning("%s: what was measured cannot be kept: %s", path, error.strerror)
