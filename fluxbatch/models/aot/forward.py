"""Packages in place of modules: each call goes to the package of its shape, or, where there is none, to the module.

A package is loaded at the first call of its shape, by the thread that launches. Compiles nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fluxbatch.models.aot.packages import Wanted
from fluxbatch.models.aot.parts import Call, Part, weights_of

logger = logging.getLogger("fluxbatch")

Forward = Callable[..., Any]


def install(part: Part, *, folder: Path, device: torch.device) -> None:
    """From now on the part's modules are computed by packages out of `folder`."""
    packages = Packages(part, folder=folder, device=device)
    for module in part.modules:
        weights = list(weights_of(module).values())
        module.forward = partial(packages, weights, module.forward)  # type: ignore[method-assign]


class Packages:
    """Owns the loaded packages of one part, one a shape."""

    def __init__(self, part: Part, *, folder: Path, device: torch.device) -> None:
        self._part, self._folder, self._device = part, folder, device
        self._loaded: dict[tuple[torch.Size, ...], Package | None] = {}

    def __call__(self, weights: list[Tensor], forward: Forward, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._loaded:
            self._loaded[shapes] = self._load(Call.of(args, kwargs))
        package = self._loaded[shapes]
        return forward(*args, **kwargs) if package is None else package([*weights, *tensors])

    def _load(self, call: Call) -> Package | None:
        wanted = Wanted.of(self._part, call, folder=self._folder, device=self._device)
        problem = wanted.problem()
        if problem is not None:
            # A launch that was halved for lack of memory comes here: it goes on, a little slower.
            logger.warning("%s: %s; these launches run uncompiled", wanted, problem)
            return None
        start_s = time.perf_counter()
        package = Package(wanted.path, self._device)
        logger.info("loaded %s in %.2f s: %s", wanted, time.perf_counter() - start_s, wanted.path.name)
        return package


class Package:
    """One loaded package."""

    def __init__(self, path: Path, device: torch.device) -> None:
        # What torch._inductor.aoti_load_package comes to, which imports the compilers first, for seconds. Single
        # threaded, for one thread launches: otherwise a second call waits until the device has done the first.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index_of(device))
        self._outputs = pytree.treespec_loads(self._loader.get_call_spec()[1])
        self._device = device
        self._ooms = self._out_of_memory_errors()

    def __call__(self, tensors: list[Tensor]) -> Any:
        try:
            outputs = self._loader.boxed_run(tensors)
        except RuntimeError as error:
            self._raise_out_of_memory(error)
            raise
        return pytree.tree_unflatten(outputs, self._outputs)

    def _raise_out_of_memory(self, error: RuntimeError) -> None:
        """Machine code tells that a call failed and not why; the allocator has counted."""
        now = self._out_of_memory_errors()
        was, self._ooms = self._ooms, now
        if now > was:
            raise torch.OutOfMemoryError(f"out of memory in a package: {str(error).partition(chr(10))[0]}") from error

    def _out_of_memory_errors(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0))


def index_of(device: torch.device) -> int:
    """As torch's loader takes it: -1 is the current one."""
    return -1 if device.index is None else device.index
