"""Which process this is, and whether another one still lives. Knows nothing of run folders."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

SUPERVISED = "FLUXBATCH_SUPERVISED"  # set for a process whose standard input ends when its supervisor does


def is_supervised(environ: Mapping[str, str]) -> bool:
    return environ.get(SUPERVISED) == "1"


def host() -> str:
    return socket.gethostname()


def started(pid: int) -> str | None:
    """When a process of this machine started (clock ticks since boot, Linux's /proc); None where that cannot be known.

    With the pid it names a process for good: a pid alone is used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]  # field 22 of proc(5); the name in field 2 may hold spaces


def is_alive(pid: int, start: str | None = None) -> bool:
    """Whether process `pid` of this machine runs; a zombie does not, nor another process under a used pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return False
    except OSError:
        pass
    return start is None or started(pid) in (None, start)
