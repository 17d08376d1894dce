"""Whether a run folder holds what its plan and ledger say, from the files alone. Changes nothing, imports no torch.

Each shard is compared with the plan's rows of that shard, so no set of all ids is held. An interrupted run is sound:
pending rows, part files of open shards and a shard that is published but not yet in the ledger are no discrepancy.
"""

from __future__ import annotations

import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from PIL import Image

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import shards, writers
from fluxbatch.output.ledger import Ledger, row_counts, torn_lines
from fluxbatch.output.left import begun_batches
from fluxbatch.output.writers import StoredRow
from fluxbatch.plan.planfile import DamagedPlanError, RunPlan
from fluxbatch.records import RowCounts, ShardCommit, ShardPlan
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder, revision_of, shard_of

DECODED_TOGETHER = 64  # images in memory at a time
NAMED_IDS = 3
ADVICE = {
    "run": "run the job again with the same command, which mends it",
    "repair": "`verify --repair` sets it aside, and the same run command then makes its rows again",
    "aside": "move it away, or let `verify --repair` do so",
    "restore": "restore it from a copy, or move the whole folder away and start again",
}
Fault = tuple[str, str]  # in words, and its remedy


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """What is wrong with one file (relative to the run folder), and what to do: a key of ADVICE."""

    file: str
    fault: str
    remedy: str

    @property
    def message(self) -> str:
        return f"{self.fault}; {ADVICE[self.remedy]}"

    @property
    def is_set_aside(self) -> bool:
        """Whether a repair takes the file out of the way."""
        return self.remedy in ("aside", "repair")


def verify(folder: RunFolder, *, decode: bool) -> tuple[RowCounts, list[Discrepancy]]:
    """The rows by state, and everything that does not fit. `decode` also decodes each image and compares its size."""
    # In this order a run that works beside us cannot look wrong: a shard's part files go after its ledger line.
    finished = folder.success.exists()
    standing = list(shards.standing_files(folder))
    parts = begun_batches(folder)
    try:
        plan = RunPlan.open(folder)
    except FluxbatchError as error:
        return RowCounts(0, 0, 0, 0, 0), [Discrepancy(folder.plan().name, str(error), "restore")]
    ledger = Ledger.read(folder, plan.revisions if plan else None)
    if plan is None:
        lost = Discrepancy(folder.plan().name, "is missing, and without it no row can be told", "restore")
        return RowCounts(0, 0, 0, 0, 0), [lost] if standing or ledger.commits else []  # else: stopped before its plan
    counts = row_counts(folder, plan, ledger)
    check = _Check(folder, plan, ledger, parts, decode, standing)
    found = [*check.shards(), *check.strays()]
    if plan.planned is None and (ledger.commits or folder.success.exists()):
        found.append(Discrepancy(folder.rejected.name, "is missing or cannot be read", "run"))
    if finished and folder.success.exists():  # a run that adds rows to the plan takes it away first
        if counts.pending == 0:
            found += _leftovers(folder)
        elif not found:  # ledger lines and their files went together
            found.append(Discrepancy(folder.success.name, f"stands although {counts.pending} rows are pending", "run"))
    return counts, found


def _leftovers(folder: RunFolder) -> Iterator[Discrepancy]:
    begun = map(folder.open_shard, shards.open_shards(folder))
    for place in (*shards.shard_places(folder), folder.batches, *begun):
        for path in sorted(place.glob(f"{commit.TEMPORARY_PREFIX}*")):
            yield Discrepancy(_relative(folder, path), "is left over from a killed run", "aside")


def _relative(folder: RunFolder, path: Path) -> str:
    return path.relative_to(folder.root).as_posix()


@dataclass
class _Check:
    """One look at a run folder."""

    folder: RunFolder
    plan: RunPlan
    ledger: Ledger
    parts: dict[int, set[int]]  # by shard, the batches whose part files are on disk
    decode: bool
    standing: list[str]  # files in data/ and failed/
    failed: set[str] = field(default_factory=set)  # ids whose last word so far is failed

    @cached_property
    def torn(self) -> list[str]:
        return torn_lines(self.folder)

    def shards(self) -> Iterator[Discrepancy]:
        """Every shard of which the ledger or the folder knows something."""
        files: defaultdict[int | None, list[str]] = defaultdict(list)
        for file in self.standing:
            if not self._is_superseded(file):
                files[shard_of(file)].append(file)
        for part in self.plan.parts:
            for shard in self.plan.shards_of(part):
                lines = self.ledger.commits.get(shard.index, ())
                try:
                    if self.ledger.complete(shard):
                        yield from self._whole_shard(shard, lines, is_retry=part.kind == "retry")
                    else:
                        yield from self._open_shard(shard, lines, files[shard.index])
                except DamagedPlanError as error:
                    yield Discrepancy(self.folder.plan(part.index).name, str(error), "restore")

    def _whole_shard(
        self, shard: ShardPlan, lines: tuple[ShardCommit, ...], *, is_retry: bool
    ) -> Iterator[Discrepancy]:
        held: dict[str, list[str]] = {}
        for line in lines:
            faults = self._faults(line.file, held.setdefault(line.file, []), line)
            yield from faults
            if faults:
                return  # what a damaged file lacks is no second finding
        planned = shards.kept_ids(shard, self.plan.rows(shard))
        if held:
            yield from (Discrepancy(lines[-1].file, fault, "repair") for fault in _row_faults(planned, held))
        failed = {row_id for line in lines if line.failed for row_id in held[line.file]}
        yield from self._retried(planned, held, failed, is_retry=is_retry)

    def _open_shard(self, shard: ShardPlan, lines: tuple[ShardCommit, ...], files: list[str]) -> Iterator[Discrepancy]:
        """A shard with rows to be made: what stands of it must be whole, or its failures alone.

        With all part files there, the run was stopped between publishing and its ledger line, and goes on from them.
        """
        if not files and not lines:
            return
        parts = self.parts.get(shard.index, set())
        is_drawn = bool(parts) and {batch.index for batch in shard.batches} <= parts
        named = {line.file: line for line in lines}
        held: dict[str, list[str]] = {}
        for file in files if is_drawn else dict.fromkeys([*files, *named]):
            faults = self._faults(file, held.setdefault(file, []), named.get(file))
            yield from faults
            if faults:
                return
        planned = shards.kept_ids(shard, self.plan.rows(shard))
        lacks = list(_row_faults(planned, held))
        if not lacks:
            torn = "".join(f" ({place} is torn or altered)" for place in self.torn[:1])
            for file in () if is_drawn else files:
                yield Discrepancy(file, f"stands without its ledger line, or another of its shard{torn}", "run")
        elif any(file.startswith("data/") for file in held):
            rows = (
                f"{sum(map(len, held.values()))} of the {shard.num_rows} rows of shard {shard.index} are accounted for"
            )
            yield Discrepancy(min(held), f"{lacks[0]}: {rows}", "repair")

    def _faults(self, file: str, ids: list[str], line: ShardCommit | None) -> list[Discrepancy]:
        """What is wrong with a file by itself; fills in the ids that it holds."""
        path = self.folder.root / file
        faults = list(_altered(path, line)) if line else []
        faults = faults or list(_content(path, ids, decode=self.decode))
        strays = list(_stray_images(path)) if path.name == writers.METADATA and not faults else []
        return [Discrepancy(file, fault, remedy) for fault, remedy in faults] + [
            Discrepancy(_relative(self.folder, stray), f"is not named by {writers.METADATA} beside it", "aside")
            for stray in strays
        ]

    def _retried(
        self, planned: list[str], held: dict[str, list[str]], failed: set[str], *, is_retry: bool
    ) -> Iterator[Discrepancy]:
        """A row is tried again only where its last word was failed: else it would be written twice."""
        if is_retry:
            for file, ids in held.items():
                twice = [row_id for row_id in ids if row_id not in self.failed]
                if twice:
                    yield Discrepancy(file, f"holds rows that other shards have too: {_named(twice)}", "restore")
            self.failed -= set(planned)
        self.failed |= failed

    def strays(self) -> Iterator[Discrepancy]:
        """Files in data/ and failed/ that belong to no shard, or to one that the ledger finds elsewhere."""
        for file in self.standing:
            shard = self._shard(shard_of(file))
            if shard is None:
                yield Discrepancy(file, "belongs to no shard of the plan", "aside")
                continue
            if self._is_superseded(file):
                if self.ledger.complete(shard):
                    yield Discrepancy(file, "is superseded: its rows were made again, or stand in a revision", "run")
                continue
            is_named = any(line.file == file for line in self.ledger.commits.get(shard.index, ()))
            if self.ledger.complete(shard) and not is_named:
                yield Discrepancy(file, f"is not what the ledger names for shard {shard.index}", "aside")

    def _is_superseded(self, file: str) -> bool:
        return revision_of(file) < self.plan.revisions.get(shard_of(file) or 0, 0)

    def _shard(self, index: int | None) -> ShardPlan | None:
        for part in self.plan.parts:
            if index is not None and part.first_shard <= index < part.first_shard + part.num_shards:
                return self.plan.shard(index)
        return None


def _altered(path: Path, line: ShardCommit) -> Iterator[Fault]:
    """How a file differs from its ledger line."""
    size = path.stat().st_size if path.exists() else -1
    told = f"has {size} bytes where the ledger says {line.bytes}"
    if size < line.bytes:
        yield ("is missing", "run") if size < 0 else (told, "run")
    elif size > line.bytes:
        yield told, "repair"
    elif commit.sha256_file(path) != line.sha256:
        yield "has another sha256 than the ledger says", "repair"


def _content(path: Path, ids: list[str], *, decode: bool) -> Iterator[Fault]:
    """Fills in the ids that the file holds; yields what is wrong with its images."""
    try:
        if not decode or path.parent.name == "failed":
            ids += writers.stored_ids(path)
            return
        for row, fault in _decoded(writers.stored_rows(path)):
            ids.append(row.id)
            if fault:
                yield fault
    except FluxbatchError as error:
        yield str(error), "repair"


def _stray_images(metadata: Path) -> list[Path]:
    named = {metadata, *(image.path for image in writers.image_files(metadata))}
    return sorted(path for path in set(metadata.parent.iterdir()) - named if not path.name.startswith("."))


def _decoded(rows: Iterator[StoredRow]) -> Iterator[tuple[StoredRow, Fault | None]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(islice(rows, DECODED_TOGETHER)):
            yield from zip(chunk, pool.map(_image_fault, chunk), strict=True)


def _image_fault(row: StoredRow) -> Fault | None:
    if row.image is None:
        return f"{row.file} is missing", "run"
    if not row.sound:
        return f"{row.file} has another sha256 than recorded", "repair"
    try:
        with Image.open(io.BytesIO(row.image)) as image:
            image.load()
            size = image.height, image.width
    except Exception as error:  # a decoder raises whatever it likes on damaged bytes
        return f"the image of row {row.id!r} does not decode ({error})", "repair"
    if size != (row.height, row.width):
        told = f"is {size[0]}x{size[1]} where its row says {row.height}x{row.width}"
        return f"the image of row {row.id!r} {told}", "repair"
    return None


def _row_faults(planned: list[str], held: dict[str, list[str]]) -> Iterator[str]:
    times = Counter(row_id for ids in held.values() for row_id in ids)
    faults = {
        "lacks rows of the plan": [row_id for row_id in planned if row_id not in times],
        "holds rows that are not the plan's": sorted(times.keys() - set(planned)),
        "holds rows twice, or rows that failed/ holds too": [row_id for row_id, number in times.items() if number > 1],
    }
    for fault, ids in faults.items():
        if ids:
            yield f"{fault}: {_named(ids)}"


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    return ", ".join(map(repr, ids[:NAMED_IDS])) + more
