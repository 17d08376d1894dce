"""How fast earlier runs were, and how large their images: measured figures, kept between jobs in the user's cache.

One JSON file for each model, shape and device, with the last few runs in it. Losing it costs an estimate its ground
and nothing else. Knows numbers only: which log they came from, and what is made of them, is for others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluxbatch.config import SPEED_AFFECTING, JobConfig, OutputConfig, setting
from fluxbatch.records import Bucket
from fluxbatch.storage import commit
from fluxbatch.user_cache import cache_folder

log = logging.getLogger(__name__)

KEPT_RUNS = 8


@dataclass(frozen=True, slots=True)
class Observed:
    """What one run measured of one bucket, first launches of a shape left out. Padding counts as launched."""

    run: str  # its folder: a resume replaces what its earlier part said
    time: str
    launched: int  # images
    seconds: float
    low_s: float  # an image of a quick batch and of a slow one: the 10th and 90th percentile
    high_s: float
    warm_up_s: float  # of the first launches
    peak_gib: float | None
    codec: str
    bytes_per_pixel: float | None  # of the whole run


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one bucket on one device."""

    bucket: Bucket
    device: str
    runs: tuple[Observed, ...]

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Of one launched image: low, likely, high."""
        likely = sum(run.seconds for run in self.runs) / sum(run.launched for run in self.runs)
        return min(likely, *(run.low_s for run in self.runs)), likely, max(likely, *(run.high_s for run in self.runs))


def codec(output: OutputConfig) -> str:
    """The image format with what decides its size."""
    return f"{output.image_format}-{output.png_level if output.image_format == 'png' else output.quality}"


def remember(cfg: JobConfig, *, device: str, observed: Mapping[Bucket, Observed]) -> None:
    """Keep what a run measured, beside what earlier ones did. A cache that cannot be written is said, once."""
    for bucket, new in observed.items():
        path = _path(cfg, bucket, device)
        found = _read(path)
        others = [run for run in found.runs if run.run != new.run] if found else []
        runs = [asdict(run) for run in [*others, new][-KEPT_RUNS:]]
        content = {"settings": _settings(cfg), "bucket": asdict(bucket), "device": device, "runs": runs}
        try:
            commit.replace_file(path, json.dumps(content, indent=1).encode())
        except OSError as error:
            log.warning("%s: what was measured cannot be kept: %s", path, error.strerror)
            return


def recall(cfg: JobConfig) -> list[Known]:
    """All buckets that were measured with this model at these settings, on the device that was used last."""
    try:
        paths = sorted(_folder().glob(f"{_word(cfg.model.name)}-*.json"), key=lambda path: path.stat().st_mtime_ns)
    except OSError as error:
        log.warning("%s: what was measured before cannot be read: %s", _folder(), error.strerror)
        return []
    found = [known for path in paths if (known := _read(path, settings=_settings(cfg)))]
    return [known for known in found if known.device == found[-1].device]


def _settings(cfg: JobConfig) -> dict[str, Any]:
    return {key: setting(cfg, key) for key in SPEED_AFFECTING}


def _folder() -> Path:
    return cache_folder(os.environ) / "rates"


def _path(cfg: JobConfig, bucket: Bucket, device: str) -> Path:
    key = json.dumps([_settings(cfg), device], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return _folder() / f"{_word(cfg.model.name)}-{bucket.name}-{digest}.json"


def _word(name: str) -> str:
    return re.sub(r"[^\w.]", "_", name)


def _read(path: Path, *, settings: dict[str, Any] | None = None) -> Known | None:
    """A file's content; None where there is none, an unreadable one (which is said), or one of other settings."""
    try:
        content = json.loads(path.read_bytes())
        if settings is not None and content["settings"] != settings:
            return None
        runs = tuple(Observed(**run) for run in content["runs"])
        if not runs or not all(run.launched > 0 and run.seconds > 0 for run in runs):
            raise ValueError("a number that must be positive is not")
        return Known(Bucket(**content["bucket"]), str(content["device"]), runs)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: what was measured before cannot be read: %s", path, error)
        return None


def bytes_per_pixel(known: Sequence[Known], codec: str) -> list[float]:
    """One figure for each run that compressed so."""
    by_run = {run.run: run.bytes_per_pixel for of in known for run in of.runs if run.codec == codec}
    return [size for size in by_run.values() if size]
