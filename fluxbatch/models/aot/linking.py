"""How a package is linked: it shows the process what torch's loader asks for, and keeps the rest to itself.

A compiler that links the C++ library statically (`CXX` of some container images) puts a second one into a package. Its
symbols then mix with those of the process, and the first std::regex of torch's own code ends the process by SIGSEGV.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

from fluxbatch.models.aot.packages import publishing

EXPORTS = "{ global: AOTInductor*; local: *; };\n"  # a version script: ld, lld, gold and mold read it
COMPILER = """#!/bin/sh
for word in "$@"; do
    if [ "$word" = -shared ]; then exec {compiler} "$@" -Wl,--version-script={exports}; fi
done
exec {compiler} "$@"
"""


def sealing() -> dict[str, Any]:
    """Settings with which Inductor links packages so: the compiler that it would take, by way of a script."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compiler = get_cpp_compiler()
    name = hashlib.sha256((compiler + EXPORTS + COMPILER).encode()).hexdigest()[:16]
    folder = Path(cache_dir(), "fluxbatch", name)  # always the same: precompiled headers are kept by its path
    exports = folder / "exports.map"
    script = folder / compiler.replace("/", "_")  # torch reads from its path of which kind a compiler is
    with publishing(exports) as temporary:
        temporary.write_text(EXPORTS, encoding="utf-8")
    words = {"compiler": shlex.quote(compiler), "exports": shlex.quote(str(exports))}
    with publishing(script) as temporary:
        temporary.write_text(COMPILER.format(**words), encoding="utf-8")
        temporary.chmod(0o755)
    return {"cpp.cxx": (str(script),)}
