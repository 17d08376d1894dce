"""Where host code for CUDA finds headers and the driver's library: a toolkit, or what pip and the driver bring.

AOTInductor wants a CUDA_HOME. A machine that has torch from pip has most of one; two small packages have the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "nv/target")
SEARCHED = ("CUDA_INC_PATH", "CPLUS_INCLUDE_PATH")  # what torch and the compiler look through besides
DRIVER = "libcuda.so.1"


@contextlib.contextmanager
def cuda_toolkit(device: torch.device, folder: Path) -> Iterator[None]:
    """While this lasts torch finds a toolkit; without a real one, links in `folder` make one."""
    if device.type != "cuda":
        yield
        return
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is not None:
        yield
        return
    before = os.environ.get("CUDA_HOME")
    home = toolkit_of_links(folder / "cuda_home", packages=Path(torch.__file__).parent.parent, driver=_driver())
    cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(home)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = None
        if before is None:
            del os.environ["CUDA_HOME"]
        else:
            os.environ["CUDA_HOME"] = before


def toolkit_of_links(home: Path, *, packages: Path, driver: Path) -> Path:
    """A folder that looks like a toolkit, out of the headers of pip's packages and the driver's library."""
    found = next((path.parent for path in sorted(packages.glob("nvidia/*/include/cuda.h"))), None)
    others = [Path(part) for name in SEARCHED for part in os.environ.get(name, "").split(":") if part]
    places = [found, *others] if found else others
    missing = [name for name in HEADERS if not any((place / name).exists() for place in places)]
    if missing or found is None:
        raise OSError(f"no CUDA_HOME, and no {', '.join(missing)} in pip's packages: pip install 'fluxbatch[aot]'")
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    _link(home / "include", found)
    _link(home / "lib64" / "libcuda.so", driver)
    return home


def _driver() -> Path:
    """The library that this process has loaded already."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    loaded = re.search(r"/\S*libcuda\.so\.\S+", maps)
    if loaded is None:
        raise OSError(f"no {DRIVER} is loaded: model.compile=aot compiles for CUDA where there is a GPU")
    return Path(loaded[0])


def _link(link: Path, target: Path) -> None:
    """Over an older one: packages move."""
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)
