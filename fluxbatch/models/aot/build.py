"""Make a package: torch.export of one module with its weights as arguments, then AOTInductor. Slow by nature."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fluxbatch.errors import FluxbatchError
from fluxbatch.models.aot.forward import index_of
from fluxbatch.models.aot.linking import sealing
from fluxbatch.models.aot.packages import KEY, Wanted, publishing
from fluxbatch.models.aot.parts import weights_of
from fluxbatch.models.aot.toolkit import cuda_toolkit

logger = logging.getLogger("fluxbatch")

CUDNN = "_native_cudnn"
LOAD = """import sys, torch
package, kind, index = sys.argv[1:]
torch.empty(1, device=kind)
torch._C._aoti.AOTIModelPackageLoader(package, "model", True, 1, int(index))"""


class _Functional(nn.Module):
    """A module as a function of its weights. Outputs have no gaps: they are the next block's inputs."""

    _module: nn.Module

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)  # not a submodule: its weights would become constants
        self._names = tuple(names)

    def forward(self, weights: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(self._names, weights, strict=True))
        outputs = torch.func.functional_call(self._module, named, args, kwargs)
        return pytree.tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, outputs)


def build(wanted: Wanted, module: nn.Module, *, device: torch.device) -> None:
    """Make one package and publish it. `module` is any of its kind; FluxbatchError where the compiler fails."""
    start_s = time.perf_counter()
    weights = weights_of(module)
    args, kwargs = wanted.call.example(device)
    try:
        with publishing(wanted.path) as temporary, torch.no_grad(), _quiet(), _attention(wanted.part.attention):
            program = torch.export.export(
                _Functional(module, list(weights)), (tuple(weights.values()), args, kwargs), strict=False
            )
            metadata = {"aot_inductor.metadata": {KEY: json.dumps(wanted.key)}}
            with cuda_toolkit(device, wanted.path.parent):
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(temporary), inductor_configs={**metadata, **sealing()}
                )
            prove(temporary, device)
    except Exception as error:  # the compilers' errors have no common base
        raise FluxbatchError(f"{wanted} cannot be compiled: {str(error).strip().partition(chr(10))[0]}") from error
    if wanted.part.attention == CUDNN and not _calls(wanted.path, "scaled_dot_product_cudnn_attention"):
        logger.warning("%s: the package does not use cuDNN's attention", wanted)
    size_mib = wanted.path.stat().st_size / 2**20
    logger.info("compiled %s in %.1f s: %s, %.1f MiB", wanted, time.perf_counter() - start_s, wanted.path, size_mib)


def prove(package: Path, device: torch.device) -> None:
    """Load it in a process of its own: a library that does not fit kills whoever loads it. RuntimeError where it did.

    Other failures are left to a run, which ends with a sentence: here the GPU may serve one process only.
    """
    command = [sys.executable, "-c", LOAD, str(package), device.type, str(index_of(device))]
    loaded = subprocess.run(command, capture_output=True, check=False)
    if loaded.returncode < 0:
        name = signal.Signals(-loaded.returncode).name
        raise RuntimeError(f"a process that loads the package is ended by {name}")


@contextlib.contextmanager
def _attention(backend: str) -> Iterator[None]:
    """The choice is made where the graph is lowered, long after diffusers' own context is left."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if backend == CUDNN else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about itself
        yield


def _calls(package: Path, function: str) -> bool:
    with zipfile.ZipFile(package) as archive:
        return any(function.encode() in archive.read(name) for name in archive.namelist() if name.endswith(".cpp"))
