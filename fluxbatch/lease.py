"""Who works in this run folder now. A lease saves work and proves nothing: the commit alone keeps data safe."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from fluxbatch import commit, process
from fluxbatch.errors import FolderBusyError
from fluxbatch.folder import RunFolder

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
STALE_S = 120.0  # a lease of another host without a heartbeat for so long is nobody's


class Lease:
    """Owns one rank's place in a run folder while the context is open, and keeps its heartbeat.

    Entering raises `FolderBusyError` while another live process holds this rank, or works with another number of
    ranks; a dead owner's lease is taken over with a line in the log.
    """

    def __init__(self, folder: RunFolder, *, rank: int, world_size: int) -> None:
        self._folder = folder
        self._path = folder.lease(rank)
        self._record = {
            "rank": rank,
            "world_size": world_size,
            "host": process.host(),
            "pid": os.getpid(),
            "process_started": process.started(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self._folder.locks.mkdir(parents=True, exist_ok=True)
        self._refuse_other_world_size()
        while not commit.publish_file(self._path, lambda file: file.write(self._content())):
            self._take_over_or_refuse()
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the place back; once more does nothing."""
        self._closing.set()
        self._heart.join()
        if _is_same_owner(_read(self._path), self._record):
            self._path.unlink(missing_ok=True)

    def _content(self) -> bytes:
        return json.dumps(self._record | {"heartbeat": time.time()}).encode()

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            # A full disk or a lost mount shows where the data is written; the heartbeat is not the place to fail.
            with contextlib.suppress(OSError):
                if _is_same_owner(_read(self._path), self._record):
                    commit.replace_file(self._path, self._content())

    def _take_over_or_refuse(self) -> None:
        owner = _read(self._path)
        if owner and is_live(owner):
            raise FolderBusyError(_sentence(self._folder, owner))
        aside = commit.temporary_sibling(self._path)
        with contextlib.suppress(FileNotFoundError):  # another starter was quicker
            os.rename(self._path, aside)
            if _read(aside) != owner:  # not the one that was judged: another starter has just taken over
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path)
            elif owner:
                log.warning("took over the lease of a dead run: %s", _who(owner))
            aside.unlink()

    def _refuse_other_world_size(self) -> None:
        for path in self._folder.locks.glob("rank-*.json"):
            owner = _read(path)
            if owner and owner.get("world_size") != self._record["world_size"] and is_live(owner):
                raise FolderBusyError(_sentence(self._folder, owner))


def live_owners(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of all processes that work in the folder now."""
    owners = [_read(path) for path in sorted(folder.locks.glob("rank-*.json"))]
    return [owner for owner in owners if owner and is_live(owner)]


def is_live(owner: dict[str, Any]) -> bool:
    """Exact on the owner's host (pid and its start time); elsewhere by the age of the heartbeat."""
    if owner.get("host") == process.host():
        return process.is_alive(int(owner.get("pid", 0)) or 2**22 + 1, owner.get("process_started"))
    return time.time() - float(owner.get("heartbeat", 0)) < STALE_S


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _is_same_owner(owner: dict[str, Any] | None, record: dict[str, Any]) -> bool:
    keys = ("host", "pid", "process_started")
    return owner is not None and all(owner.get(key) == record[key] for key in keys)


def _who(owner: dict[str, Any]) -> str:
    job = f", job {owner['job']}" if owner.get("job") else ""
    return (
        f"host {owner.get('host')}, pid {owner.get('pid')}{job}, rank {owner.get('rank')}, since {owner.get('since')}"
    )


def _sentence(folder: RunFolder, owner: dict[str, Any]) -> str:
    return f"output.dir {folder.root} belongs to a live run ({_who(owner)}); wait for it, stop it, or choose another"
