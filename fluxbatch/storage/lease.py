"""Who works in this run folder now. A lease saves work and proves nothing: the commit alone keeps data safe."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxbatch import process
from fluxbatch.errors import FolderBusyError
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.objects import ObjectPath

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
SLOWEST_HEARTBEAT_S = 30.0  # four of them make a lease stale
HEARTBEATS_PER_S = 20  # of all ranks together, as far as that allows: they all write into one folder
STALE_S = 120.0  # a lease of another host without a heartbeat for so long is nobody's

Owner = dict[str, Any]  # what a file under locks/ says of its process


class Lease:
    """Owns one rank's place in a run folder while the context is open, and keeps its heartbeat.

    Entering raises `FolderBusyError` while another live process holds this rank, or works with another number of
    ranks; a dead owner's lease is taken over with a line in the log. So is that of an earlier start of our own Slurm
    job: a scheduler that lost a node starts the job elsewhere, while its first copy may still run over there. That
    copy finds its lease taken at its next heartbeat and calls `superseded` with a sentence.
    """

    def __init__(
        self, folder: RunFolder, *, rank: int, world_size: int, superseded: Callable[[str], object] = log.warning
    ) -> None:
        self.record: Owner = {
            "rank": rank,
            "world_size": world_size,
            "host": process.host(),
            "pid": os.getpid(),
            "process_started": process.started(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart": _restarts(os.environ.get("SLURM_RESTART_COUNT")),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._folder = folder
        self._path = folder.lease(rank)
        self._superseded = superseded
        self._taken: set[Path] = set()
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self._folder.locks.mkdir(parents=True, exist_ok=True)
        self._refuse_other_world_size()
        owner = occupy(self._path, self.record, gives_way=self._gives_way)
        if owner:
            raise FolderBusyError(_sentence(self._folder, owner))
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the place back, and all that was taken beside it; once more does nothing."""
        self._closing.set()
        self._heart.join()
        for path in (*list(self._taken), self._path):
            _leave(path, self.record)

    def take(self, path: Path) -> Owner | None:
        """Take another place under locks/, worth as much as its owner's lease. None: it is ours; else whose."""
        owner = occupy(path, self.record, gives_way=lambda owner: not holds_lease(self._folder, owner))
        if owner and not is_same_owner(owner, self.record):
            return owner
        self._taken.add(path)
        return None

    def give_back(self, path: Path) -> None:
        """Leave a place that was taken."""
        self._taken.discard(path)
        _leave(path, self.record)

    def _beat(self) -> None:
        while not self._closing.wait(heartbeat_s(self.record["world_size"])):
            # A full disk or a lost mount shows where the data is written; the heartbeat is not the place to fail.
            with contextlib.suppress(OSError):
                self.beat()

    def beat(self) -> None:
        """Say that we live; one that was started again in our place is told of and left alone."""
        owner = read_owner(self._path)
        if is_same_owner(owner, self.record):
            commit.replace_file(self._path, _content(self.record), durable=False)
        elif owner and _is_restart(owner, of=self.record):
            self._superseded(f"this job was started again ({who(owner)})")
            self._closing.set()

    def _gives_way(self, owner: Owner) -> bool:
        return not is_live(owner) or _is_restart(self.record, of=owner)

    def _refuse_other_world_size(self) -> None:
        for owner in live_owners(self._folder):
            if owner.get("world_size") != self.record["world_size"] and not _is_restart(self.record, of=owner):
                raise FolderBusyError(_sentence(self._folder, owner))


def heartbeat_s(world_size: int) -> float:
    """Seconds between two signs of life of one rank."""
    return min(max(HEARTBEAT_S, world_size / HEARTBEATS_PER_S), SLOWEST_HEARTBEAT_S)


def occupy(path: Path, record: Owner, *, gives_way: Callable[[Owner], bool]) -> Owner | None:
    """Create `path` with our record, also in the place of an owner who `gives_way`. None: it is ours; else whose."""
    while not commit.publish_file(path, lambda file: file.write(_content(record))):
        owner = read_owner(path)
        if owner and not gives_way(owner):
            return owner
        if _take_over(path, owner, record):
            return None
    return None


def _leave(path: Path, record: Owner) -> None:
    """Remove a file of ours; one that is another's by now stays."""
    if is_same_owner(read_owner(path), record):
        path.unlink(missing_ok=True)


def _take_over(path: Path, owner: Owner | None, record: Owner) -> bool:
    """Remove the record that was judged, and no other; True where that put ours in its place at once."""
    if isinstance(path, ObjectPath):
        with contextlib.suppress(FileNotFoundError):
            e_tag = path.stat().e_tag
            if read_owner(path) == owner and path.store.put_if_same(path.key, _content(record), e_tag):
                _say_taken_over(path, owner)
                return True
        return False
    aside = commit.temporary_sibling(path)
    with contextlib.suppress(FileNotFoundError):  # another starter was quicker
        os.rename(path, aside)
        if read_owner(aside) != owner:  # not the one that was judged: another starter has just taken over
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        else:
            _say_taken_over(path, owner)
        aside.unlink()
    return False


def _say_taken_over(path: Path | ObjectPath, owner: Owner | None) -> None:
    if owner and path.name.startswith("rank-"):
        what = "dead run" if not is_live(owner) else "run that was started again"
        log.warning("took over the lease of a %s: %s", what, who(owner))


def live_owners(folder: RunFolder) -> list[Owner]:
    """The records of all processes that work in the folder now."""
    return [owner for owner in seen_owners(folder) if is_live(owner)]


def seen_owners(folder: RunFolder) -> list[Owner]:
    """The same with those of processes that died without giving their place back."""
    owners = [read_owner(path) for path in sorted(folder.locks.glob("rank-*.json"))]
    return [owner for owner in owners if owner]


def is_live(owner: Owner) -> bool:
    """Exact on the owner's host (pid and its start time); elsewhere by the age of the heartbeat."""
    if owner.get("host") == process.host():
        return process.is_alive(int(owner.get("pid", 0)) or 2**22 + 1, owner.get("process_started"))
    return time.time() - float(owner.get("heartbeat", 0)) < STALE_S


def holds_lease(folder: RunFolder, owner: Owner) -> bool:
    """Whether the owner of another file under locks/ still holds its rank's lease, and lives."""
    lease = read_owner(folder.lease(int(owner.get("rank", 0))))
    return lease is not None and is_same_owner(owner, lease) and is_live(lease)


def read_owner(path: Path) -> Owner | None:
    """What a file under locks/ says; None where there is none, or an unreadable one."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _content(record: Owner) -> bytes:
    return json.dumps(record | {"heartbeat": time.time()}).encode()


def is_same_owner(owner: Owner | None, record: Owner) -> bool:
    """Whether both tell of one process: a record in a file has a heartbeat beside."""
    keys = ("host", "pid", "process_started")
    return owner is not None and all(owner.get(key) == record[key] for key in keys)


def _is_restart(record: Owner, *, of: Owner) -> bool:
    """Whether a record is that of a later start of the same Slurm job."""
    return record.get("job") is not None and record["job"] == of.get("job") and record["restart"] > of.get("restart", 0)


def _restarts(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def who(owner: Owner) -> str:
    """For a sentence."""
    job = f", job {owner['job']}" if owner.get("job") else ""
    return (
        f"host {owner.get('host')}, pid {owner.get('pid')}{job}, rank {owner.get('rank')}, since {owner.get('since')}"
    )


def _sentence(folder: RunFolder, owner: Owner) -> str:
    return f"output.dir {folder.root} belongs to a live run ({who(owner)}); wait for it, stop it, or choose another"
