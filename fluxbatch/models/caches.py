"""Where compiled kernels are kept: on this machine's own disk, unless the user chose a place. Knows no model.

Jobs that share a home on NFS meet each other's half-written kernels there; Triton's default lies in the home.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def place_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set, and say where. A folder that cannot be used is said too, and stops nothing."""
    # One folder a user and job: what a resumed job compiled is found again, another job's files are not touched.
    job = environ.get("SLURM_JOB_ID", "local")
    folder = Path(tempfile.gettempdir()) / f"fluxbatch-{os.getuid()}" / job
    for variable, name in VARIABLES.items():
        path = Path(environ.setdefault(variable, str(folder / name)))
        problem = _problem(path)
        if problem:
            log.warning("%s=%s: %s; compiling may fail or start from nothing each time", variable, path, problem)
        else:
            log.info("compiled kernels: %s=%s", variable, path)


def _problem(path: Path) -> str | None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror
