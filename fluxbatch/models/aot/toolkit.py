"""Where host code for CUDA finds headers and libraries: a toolkit, or what pip's packages and the driver bring.

AOTInductor wants a CUDA_HOME. A machine that has torch from pip and a driver has all of it, in other places.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch


@contextlib.contextmanager
def cuda_toolkit(device: torch.device, folder: Path) -> Iterator[None]:
    """While this lasts torch finds a toolkit; without one, links in `folder` make one of pip's packages."""
    if device.type != "cuda":
        yield
        return
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is not None:
        yield
        return
    before = os.environ.get("CUDA_HOME")
    cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(_toolkit_of_links(folder / "cuda_home"))
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = None
        os.environ.pop("CUDA_HOME") if before is None else os.environ.update(CUDA_HOME=before)


def _toolkit_of_links(home: Path) -> Path:
    include, runtime, driver = _headers(), _first(_library_folders(), "libcudart.so.*"), _driver()
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    _link(home / "include", include)
    _link(home / "lib64" / "libcudart.so", runtime)
    _link(home / "lib64" / "libcuda.so", driver)
    return home


def _headers() -> Path:
    found = next((path.parent for path in _site("nvidia").glob("*/include/cuda.h")), None)
    if found is None:
        raise OSError("no cuda.h: model.compile=aot needs a CUDA toolkit (CUDA_HOME), or nvidia-cuda-runtime from pip")
    return found


def _library_folders() -> list[Path]:
    return [path for path in _site("nvidia").glob("*/lib") if path.is_dir()]


def _driver() -> Path:
    usual = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/local/cuda/compat", "/usr/lib")
    paths = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *usual]
    return _first([Path(path) for path in paths if path], "libcuda.so.1")


def _first(folders: list[Path], pattern: str) -> Path:
    for folder in folders:
        for path in sorted(folder.glob(pattern)):
            return path
    raise OSError(f"no {pattern} in {', '.join(map(str, folders)) or 'pip packages'}: set CUDA_HOME to a CUDA toolkit")


def _site(package: str) -> Path:
    return Path(torch.__file__).parent.parent / package


def _link(link: Path, target: Path) -> None:
    """Whoever comes second finds it there."""
    with contextlib.suppress(FileExistsError):
        link.symlink_to(target)
