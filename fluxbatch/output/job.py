"""job.json: the settings a run folder was started with, and what a redo has changed since. Knows no plan.

Other output-affecting settings are refused key by key, or recorded as a change.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fluxbatch import __version__
from fluxbatch.config import JobConfig, fingerprint
from fluxbatch.errors import ConfigError
from fluxbatch.lora_files import lora_digests
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

PACKAGES = ("torch", "diffusers", "transformers", "datasets", "pyarrow", "duckdb", "pillow", "numpy", "hydra-core")
UNSAID = {"sampler.step_cache": "off", "sampler.step_cache_order": 1}  # what a job.json means that knows no such key
OURS = {"locks", "logs"}  # may stand in a folder before job.json does


def open_job(folder: RunFolder, cfg: JobConfig) -> dict[str, Any]:
    """Start the folder's job, or go on with it. Raises ConfigError where the folder holds something else."""
    stored = read_job(folder)
    if stored is None:
        _set_aside_unreadable(folder)
        _refuse_foreign_folder(folder)
        content = _as_file(_describe(cfg))
        commit.publish_file(folder.job, lambda file: file.write(content))
        stored = read_job(folder)
        assert stored is not None, f"{folder.job} was published and is not there"
    return stored


def read_job(folder: RunFolder) -> dict[str, Any] | None:
    """What job.json says; None where there is none, or an unreadable one."""
    try:
        stored = json.loads(folder.job.read_bytes())
        is_ours = all(isinstance(stored[key], dict) for key in ("fingerprint", "settings", "versions"))
        is_ours &= all(isinstance(stored[key], str) for key in ("version", "created"))
        return stored if is_ours else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def recorded_config(stored: dict[str, Any]) -> JobConfig:
    """The settings that a run folder was made with."""
    try:
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(JobConfig), stored["settings"]))
    except OmegaConfBaseException as error:
        raise ConfigError(f"job.json holds settings that this version does not know: {error}") from error
    assert isinstance(cfg, JobConfig)
    return cfg


def versions() -> dict[str, str | None]:
    """What is installed of the packages that decide bytes."""
    return {name: _version(name) for name in PACKAGES}


Differences = dict[str, dict[str, Any]]  # by key, what it was and what it is


def differences(stored: dict[str, Any], cfg: JobConfig) -> Differences:
    """The output-affecting settings that are others than the stored ones."""
    now, was = settings_record(cfg), UNSAID | stored
    return {key: {"was": was.get(key), "is": now[key]} for key in now if was.get(key) != now[key]}


def settings_record(cfg: JobConfig) -> dict[str, Any]:
    """The output-affecting settings, as they may stand in a file. LoRAs are their content, not their place."""
    return _without_secrets(fingerprint(cfg)) | {"model.loras": lora_digests(cfg.model)}


def refuse_differences(folder: RunFolder, found: Differences) -> None:
    """ConfigError with each setting that differs."""
    if found:
        told = ", ".join(f"{key} must be {change['was']!r}, got {change['is']!r}" for key, change in found.items())
        raise ConfigError(
            f"{told}: {folder.job} was begun so; run.on_change=redo makes all rows again, another output.dir keeps both"
        )


def begin_again(folder: RunFolder, cfg: JobConfig) -> dict[str, Any]:
    """Replace the job.json of a job of which nothing has been planned yet."""
    record = _describe(cfg)
    commit.replace_file(folder.job, _as_file(record))
    return record


def record_redo(
    folder: RunFolder, cfg: JobConfig, stored: dict[str, Any], parts: Sequence[tuple[str, int, dict[str, Any] | None]]
) -> dict[str, Any]:
    """Write down in job.json what the plan's redo parts have changed: each part's file, rows and new settings, if any.

    The plan is the truth: a kill before this costs a line that the next start writes.
    """
    changes = list(stored.get("changes", ()))
    fresh = parts[len(changes) :]
    if not fresh:
        return stored
    before = stored["fingerprint"]
    for part, rows, settings in fresh:
        settings = settings or before
        changed = {
            key: {"was": before.get(key), "is": settings[key]} for key in settings if before.get(key) != settings[key]
        }
        recorded = datetime.now(UTC).isoformat(timespec="seconds")
        changes.append({"part": part, "rows": rows, "settings": changed, "recorded": recorded})
        before = settings
    record = _describe(cfg) | {"created": stored["created"], "fingerprint": before, "changes": changes}
    commit.replace_file(folder.job, _as_file(record))
    return record


def record_reuse(folder: RunFolder, stored: dict[str, Any], reuse: dict[str, Any] | None) -> dict[str, Any]:
    """Write down in job.json which run images were taken over from, and how many. The plan is the truth here too."""
    if stored.get("reuse") == reuse:
        return stored
    record = {**stored, "reuse": reuse}
    commit.replace_file(folder.job, _as_file(record))
    return record


def _set_aside_unreadable(folder: RunFolder) -> None:
    if folder.job.exists():
        aside = folder.job.with_name("job.json.unreadable")
        folder.job.replace(aside)
        log.warning("%s was unreadable: set aside as %s and made anew", folder.job, aside.name)


def _as_file(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1, ensure_ascii=False).encode()


def _describe(cfg: JobConfig) -> dict[str, Any]:
    return {
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": _without_secrets(asdict(cfg)),
        "fingerprint": settings_record(cfg),
        "versions": versions(),
    }


def _without_secrets(value: Any) -> Any:
    """Users, passwords and queries (signatures) cut out of URLs: no secret stands in a file."""
    if isinstance(value, dict):
        return {key: _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"(\w+://[^?\s]*)\?\S*", r"\1", re.sub(r"(\w+://)[^/@\s]*@", r"\1", value))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _refuse_foreign_folder(folder: RunFolder) -> None:
    if not folder.root.exists():
        return
    strangers = sorted(
        path.name
        for path in folder.root.iterdir()
        if path.name not in OURS and not path.name.startswith((".", "job.json."))
    )
    ours = {"data", "ledger", "plan.parquet"} & set(strangers)
    if strangers and not ours:
        raise ConfigError(
            f"output.dir must be empty or a run folder of fluxbatch, got {folder.root}, which holds {strangers[0]!r}"
        )
