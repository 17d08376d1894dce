"""Where compiled kernels are kept between runs, and how many were compiled. Knows nothing of what is compiled.

Jobs that share a home on a network file system break each other's caches (stale handles, files missing in mid-compile),
so the folder is node-local unless the user says otherwise.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fluxbatch import __version__
from fluxbatch.config import ModelConfig
from fluxbatch.user_cache import cache_folder, temporary_folder

logger = logging.getLogger("fluxbatch")

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|beegfs\w*|ceph|glusterfs|fuse\..*|afs|9p|pvfs2|panfs|wekafs|orangefs|virtiofs"
)
MOUNTS = Path("/proc/self/mounts")


def keep_compiled(cfg: ModelConfig, device: torch.device, environ: MutableMapping[str, str]) -> None:
    """Point torch's and Triton's caches to our folder, before either compiles; what the user has set stays."""
    if device.type != "cuda" and cfg.compile != "aot":
        return
    unset = [name for name in VARIABLES if not environ.get(name)]
    if unset:
        folder = _usable(_wanted(cfg, environ)) / _key(cfg, device)
        environ.update({name: str(folder / VARIABLES[name]) for name in unset})
    for name in VARIABLES:
        logger.info("compiled kernels are kept in %s (%s)", environ[name], name)


def packages_folder(cfg: ModelConfig, environ: Mapping[str, str]) -> Path:
    """Where packages compiled ahead of time are kept: each says itself what it is for."""
    return _usable(_wanted(cfg, environ)) / "ahead"


def _wanted(cfg: ModelConfig, environ: Mapping[str, str]) -> Path:
    if cfg.compile_cache:
        return Path(cfg.compile_cache).expanduser().absolute()
    ours = cache_folder(environ) / "compiled"
    return temporary_folder() / "compiled" if is_on_network(ours, MOUNTS) else ours


def is_on_network(path: Path, mounts: Path) -> bool:
    """Whether a path, or what exists of it, lies on a file system that other machines share."""
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return False  # no Linux: no such table
    kinds = {Path(_unescaped(fields[1])): fields[2] for fields in lines if len(fields) > 2}  # the last mount counts
    place = path.resolve()
    kind = next((kinds[parent] for parent in (place, *place.parents) if parent in kinds), "")
    return NETWORK_FILE_SYSTEMS.fullmatch(kind) is not None


def _unescaped(text: str) -> str:
    """Spaces and the like stand as octal numbers in the table of mounts."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), text)


def _usable(folder: Path) -> Path:
    """The folder, or a temporary one where nothing can be written to it: a cache never stops a job."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(b"fluxbatch")
    except OSError as error:
        logger.warning("%s cannot keep compiled kernels (%s); %s does", folder, error.strerror, temporary_folder())
        return temporary_folder() / "compiled"
    return folder


def _key(cfg: ModelConfig, device: torch.device) -> str:
    """Versions, GPU and recipe: other kernels never meet in one folder, and an old one can be deleted by its name."""
    gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    recipe = "-".join((cfg.kernels, cfg.quantization, cfg.compile))
    known = f"{__version__} {torch.__version__} {torch.version.cuda} {_triton_version()} {gpu} {recipe}"
    return f"torch{torch.__version__}-{gpu}-{recipe}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def _triton_version() -> str:
    if importlib.util.find_spec("triton") is None:
        return "none"
    import triton

    return triton.__version__


@dataclass(frozen=True, slots=True)
class Compiled:
    """What was compiled, and what a cache had: graphs of torch.compile and kernels of Triton."""

    graphs: int = 0
    kernels: int = 0
    from_cache: int = 0
    seconds: float = 0.0  # of tracing and compiling together

    def __sub__(self, other: Compiled) -> Compiled:
        return Compiled(
            self.graphs - other.graphs,
            self.kernels - other.kernels,
            self.from_cache - other.from_cache,
            self.seconds - other.seconds,
        )

    def __str__(self) -> str:
        return (
            f"compiled {self.graphs} graphs and {self.kernels} kernels in {self.seconds:.1f} s, "
            f"{self.from_cache} more came from the cache"
        )


class CompileWatch:
    """Counts from now on. torch counts for itself; Triton tells whoever listens, unless somebody does already."""

    def __init__(self) -> None:
        self._kernels = self._from_cache = 0
        self._kernel_s = 0.0
        if importlib.util.find_spec("triton") is not None:
            from triton import knobs

            if knobs.compilation.listener is None:
                knobs.compilation.listener = self._on_kernel

    def _on_kernel(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        self._kernels += not cache_hit
        self._from_cache += cache_hit
        self._kernel_s += 0.0 if cache_hit else times.total / 1e6  # microseconds

    def read(self) -> Compiled:
        """All of this process since this watch began (kernels), or since it started (graphs): subtract two."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not there: nothing was compiled, and it is slow to import
        if dynamo is None:
            return Compiled(0, self._kernels, self._from_cache, self._kernel_s)
        counts = dynamo.counters["inductor"]
        graph_s = sum(dynamo.compilation_time_metrics.get("_compile.compile_inner", ()))
        hits = self._from_cache + counts["fxgraph_cache_hit"]
        return Compiled(counts["fxgraph_cache_miss"], self._kernels, hits, graph_s + self._kernel_s)
