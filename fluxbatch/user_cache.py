"""Where what is worth keeping between jobs lies: the user's cache folder. Never part of a run folder; losing it costs
time and nothing else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "FLUXBATCH_CACHE"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """$FLUXBATCH_CACHE, else $XDG_CACHE_HOME/fluxbatch, else ~/.cache/fluxbatch; no HOME: a temporary folder."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).expanduser().absolute()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).absolute() / "fluxbatch"
    if environ.get("HOME"):
        return Path(environ["HOME"]).absolute() / ".cache" / "fluxbatch"
    return temporary_folder()


def temporary_folder() -> Path:
    """Ours in $TMPDIR, apart from other users'."""
    return Path(tempfile.gettempdir()) / f"fluxbatch-{os.getuid()}"
