"""job.json: the settings a run folder was started with. Written once; a start with others is refused, key by key."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fluxbatch import __version__, commit
from fluxbatch.config import JobConfig, fingerprint
from fluxbatch.errors import ConfigError
from fluxbatch.folder import RunFolder

log = logging.getLogger(__name__)

PACKAGES = ("torch", "diffusers", "transformers", "datasets", "pyarrow", "duckdb", "pillow", "numpy", "hydra-core")
OURS = {"locks", "logs"}  # may stand in a folder before job.json does


def open_job(folder: RunFolder, cfg: JobConfig) -> dict[str, Any]:
    """Start the folder's job, or go on with it.

    Raises ConfigError where the folder holds something else, or a job whose output-affecting settings differ.
    """
    stored = read_job(folder)
    if stored is None:
        _set_aside_unreadable(folder)
        _refuse_foreign_folder(folder)
        content = json.dumps(_describe(cfg), indent=1, ensure_ascii=False).encode()
        commit.publish_file(folder.job, lambda file: file.write(content))
        stored = read_job(folder)
        assert stored is not None, f"{folder.job} was published and is not there"
    _refuse_differences(folder, stored["fingerprint"], fingerprint(cfg))
    return stored


def read_job(folder: RunFolder) -> dict[str, Any] | None:
    """What job.json says; None where there is none, or an unreadable one."""
    try:
        stored = json.loads(folder.job.read_bytes())
        is_ours = all(isinstance(stored[key], dict) for key in ("fingerprint", "settings"))
        return stored if is_ours else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def refuse_other_settings(folder: RunFolder, cfg: JobConfig) -> None:
    """ConfigError where the folder's job was started with other output-affecting settings. Changes nothing."""
    stored = read_job(folder)
    if stored is not None:
        _refuse_differences(folder, stored["fingerprint"], fingerprint(cfg))


def _set_aside_unreadable(folder: RunFolder) -> None:
    if folder.job.exists():
        aside = folder.job.with_name("job.json.unreadable")
        folder.job.replace(aside)
        log.warning("%s was unreadable: set aside as %s and made anew", folder.job, aside.name)


def _describe(cfg: JobConfig) -> dict[str, Any]:
    return {
        "version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": _without_secrets(asdict(cfg)),
        "fingerprint": _without_secrets(fingerprint(cfg)),
        "versions": {name: _version(name) for name in PACKAGES},
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


def _refuse_differences(folder: RunFolder, stored: dict[str, Any], ours: dict[str, Any]) -> None:
    differences = [key for key in ours if stored.get(key) != _without_secrets(ours[key])]
    if differences:
        key = differences[0]
        others = f" (and {', '.join(differences[1:])})" if differences[1:] else ""
        raise ConfigError(
            f"{key} must be {stored.get(key)!r} as in {folder.job}, got {ours[key]!r}{others}; "
            "choose another output.dir for another result"
        )
