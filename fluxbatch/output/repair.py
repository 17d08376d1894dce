"""Take damaged files out of the way, so that a run makes exactly their rows again. Draws nothing and deletes nothing.

A file is set aside before its ledger line is taken back: killed in between, the folder only lacks a file, and a run
makes that again. The other order could leave a damaged file that a run would take over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fluxbatch.output import writers
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.verify import Discrepancy, verify
from fluxbatch.plan.planfile import DamagedPlanError, RunPlan
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder, shard_of
from fluxbatch.storage.lease import Lease

log = logging.getLogger(__name__)

RANK = 0  # in whose ledger the lines are taken back; no other rank works meanwhile


@dataclass(frozen=True, slots=True)
class Move:
    """One file or folder that was set aside; both names are relative to the run folder."""

    file: str
    now: str


def repair(folder: RunFolder, *, decode: bool) -> list[Move]:
    """Verify, and set aside what neither belongs there nor can be mended in place. Raises FolderBusyError.

    What a run mends by itself is left to it, and so is what only a copy can restore.
    """
    with Lease(folder, rank=RANK, world_size=1):
        _, found = verify(folder, decode=decode)
        ledger = Ledger.read(folder, plan.revisions if (plan := _plan(folder)) else None)
        files = list(dict.fromkeys(file for fault in found for file in _files(fault, ledger)))
        if files:
            folder.success.unlink(missing_ok=True)
        moves = [_set_aside(folder, file) for file in files if (folder.root / file).exists()]
        for line in [line for lines in ledger.commits.values() for line in lines if line.file in files]:
            ledger.forget(folder, RANK, line)
            commit.step("forgotten", folder.root / line.file)
    return moves


def _plan(folder: RunFolder) -> RunPlan | None:
    try:
        return RunPlan.open(folder)
    except DamagedPlanError:
        return None


def _files(fault: Discrepancy, ledger: Ledger) -> Iterable[str]:
    """What goes with a damaged file: with a file of failures also the images, for a row may fail no more."""
    if not fault.is_set_aside:
        return []
    shard = shard_of(fault.file)
    if fault.remedy == "aside" or shard is None or fault.file.startswith("data/"):
        return [fault.file]
    return [*(line.file for line in ledger.commits.get(shard, ()) if line.rows), fault.file]


def _set_aside(folder: RunFolder, file: str) -> Move:
    path = folder.root / file
    path = path.parent if path.name == writers.METADATA else path
    target = _free_name(folder.aside / path.relative_to(folder.root))
    target.parent.mkdir(parents=True, exist_ok=True)
    commit.step("before_aside", path)
    commit.move(path, target)
    commit.step("aside", path)
    log.warning("%s: set aside as %s", path, target)
    return Move(path.relative_to(folder.root).as_posix(), target.relative_to(folder.root).as_posix())


def _free_name(path: Path) -> Path:
    """This name, or with the first number that is free: nothing that was set aside before is replaced."""
    number = 0
    free = path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
