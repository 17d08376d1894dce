"""Whether a run folder holds what its plan and ledger say, from the files alone. Changes nothing, imports no torch.

Each shard is compared with the plan's rows of that shard, so no set of all ids is held. An interrupted run is sound:
pending rows, part files of open shards and a shard that is published but not yet in the ledger are no discrepancy.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from PIL import Image

from fluxbatch import commit, writers
from fluxbatch.errors import FluxbatchError
from fluxbatch.folder import RunFolder
from fluxbatch.ledger import Ledger, row_counts, shard_of
from fluxbatch.planfile import RunPlan
from fluxbatch.records import RowCounts, ShardCommit, ShardPlan
from fluxbatch.writers import StoredRow

DECODED_TOGETHER = 64  # images in memory at a time
NAMED_IDS = 3
MAKE_AGAIN = "run the same command again to make it again"


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """What is wrong with one file (relative to the run folder), and what to do."""

    file: str
    message: str


def verify(folder: RunFolder, *, decode: bool) -> tuple[RowCounts, list[Discrepancy]]:
    """The rows by state, and everything that does not fit. `decode` also decodes each image and compares its size."""
    # In this order a run that works beside us cannot look wrong: a shard's part files go after its ledger line.
    standing = list(_standing_files(folder))
    parts = {path.name for path in folder.batches.glob("batch-*.arrow")}
    ledger = Ledger.read(folder)
    try:
        plan = RunPlan.open(folder)
    except FluxbatchError as error:
        return RowCounts(0, 0, 0, 0, 0), [Discrepancy(folder.plan().name, str(error))]
    if plan is None:
        lost = Discrepancy(folder.plan().name, "is missing; without it no row can be told")
        return RowCounts(0, 0, 0, 0, 0), [lost] if standing or ledger.commits else []  # else: stopped before its plan
    counts = row_counts(folder, plan, ledger)
    check = _Check(folder, plan, ledger, parts, decode)
    found = [*check.shards(), *check.unnamed(standing)]
    if plan.planned is None and (ledger.commits or folder.success.exists()):
        found.append(Discrepancy(folder.rejected.name, "is missing or cannot be read; the next run makes it again"))
    if folder.success.exists() and counts.pending == 0:
        found += _leftovers(folder)
    return counts, found


def _standing_files(folder: RunFolder) -> Iterator[str]:
    """What stands in data/ and failed/, relative to the run folder; temporary files and images in folders left out."""
    for place in (folder.data, folder.failures):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if not path.name.startswith(commit.TEMPORARY_PREFIX):
                yield _relative(folder, path / writers.METADATA if path.is_dir() else path)


def _leftovers(folder: RunFolder) -> Iterator[Discrepancy]:
    for place in (folder.data, folder.failures, folder.batches):
        for path in sorted(place.glob(f"{commit.TEMPORARY_PREFIX}*")):
            yield Discrepancy(_relative(folder, path), "is left over from a killed run; delete it")


def _relative(folder: RunFolder, path: Path) -> str:
    return path.relative_to(folder.root).as_posix()


@dataclass
class _Check:
    """One look at a run folder."""

    folder: RunFolder
    plan: RunPlan
    ledger: Ledger
    parts: set[str]  # names of the part files on disk
    decode: bool
    failed: set[str] = field(default_factory=set)  # ids whose last word so far is failed

    def shards(self) -> Iterator[Discrepancy]:
        """Every shard of which the ledger knows something."""
        for part in self.plan.parts:
            for shard in part.shards():
                lines = self.ledger.commits.get(shard.index, ())
                if self.ledger.complete(shard):
                    yield from self._whole_shard(shard, lines, is_retry=part.kind == "retry")
                elif lines and not self._parts_of(shard):
                    accounted = f"{self.ledger.accounted(shard)} of the {shard.num_rows} rows of shard {shard.index}"
                    yield Discrepancy(lines[0].file, f"the ledger accounts for {accounted}; {MAKE_AGAIN}")

    def _whole_shard(
        self, shard: ShardPlan, lines: tuple[ShardCommit, ...], *, is_retry: bool
    ) -> Iterator[Discrepancy]:
        held: dict[ShardCommit, list[str]] = {}
        for line in lines:
            path = self.folder.root / line.file
            messages = _altered(path, line) or _content(path, held.setdefault(line, []), decode=self.decode)
            yield from (Discrepancy(line.file, message) for message in messages)
            if messages:
                return  # what a damaged file lacks is no second finding
        planned = self.plan.rows(shard)["id"].to_pylist()
        yield from (Discrepancy(lines[-1].file, message) for message in _row_faults(planned, held))
        yield from self._retried(planned, held, is_retry=is_retry)

    def _retried(
        self, planned: list[str], held: dict[ShardCommit, list[str]], *, is_retry: bool
    ) -> Iterator[Discrepancy]:
        """A row is tried again only where its last word was failed: else it would be written twice."""
        if is_retry:
            for line, ids in held.items():
                twice = [row_id for row_id in ids if row_id not in self.failed]
                if twice:
                    yield Discrepancy(line.file, f"holds rows that other shards have too: {_named(twice)}")
            self.failed -= set(planned)
        self.failed |= {row_id for line, ids in held.items() if line.failed for row_id in ids}

    def unnamed(self, standing: Iterable[str]) -> Iterator[Discrepancy]:
        """Files in data/ and failed/ that no ledger line names."""
        for file in standing:
            shard = self._shard(shard_of(file))
            if shard is None:
                yield Discrepancy(file, "belongs to no shard of the plan; move it away")
                continue
            is_named = any(line.file == file for line in self.ledger.commits.get(shard.index, ()))
            if self.ledger.complete(shard) and not is_named:
                yield Discrepancy(file, f"is not what the ledger names for shard {shard.index}; move it away")
            elif not is_named and len(self._parts_of(shard)) < len(shard.batches):
                yield Discrepancy(file, "stands without its ledger line; run the same command again to take it over")

    def _parts_of(self, shard: ShardPlan) -> set[str]:
        return {self.folder.batch(batch.index).name for batch in shard.batches} & self.parts

    def _shard(self, index: int | None) -> ShardPlan | None:
        for part in self.plan.parts:
            if index is not None and part.first_shard <= index < part.first_shard + part.num_shards:
                return part.shard(index)
        return None


def _altered(path: Path, line: ShardCommit) -> list[str]:
    """How a file differs from its ledger line."""
    if not path.exists():
        return [f"is missing; {MAKE_AGAIN}"]
    size = path.stat().st_size
    if size < line.bytes:
        return [f"has {size} bytes where the ledger says {line.bytes}; {MAKE_AGAIN}"]
    if size > line.bytes:
        return [f"has {size} bytes where the ledger says {line.bytes}; restore it, or delete it to make it again"]
    if commit.sha256_file(path) != line.sha256:
        return ["has another sha256 than the ledger says; restore it, or delete it to make it again"]
    return []


def _content(path: Path, ids: list[str], *, decode: bool) -> list[str]:
    """Fills in the ids that the file holds; returns what is wrong with its images."""
    messages: list[str] = []
    try:
        messages += _stray_images(path) if path.name == writers.METADATA else []
        if not decode or path.parent.name == "failed":
            ids += writers.stored_ids(path)
            return messages
        for row, fault in _decoded(writers.stored_rows(path)):
            ids.append(row.id)
            messages += [fault] if fault else []
    except FluxbatchError as error:
        messages.append(str(error))
    return messages


def _stray_images(metadata: Path) -> list[str]:
    named = {metadata, *(image.path for image in writers.image_files(metadata))}
    strays = sorted(path.name for path in set(metadata.parent.iterdir()) - named if not path.name.startswith("."))
    return [f"does not name {name}, which lies beside it; move that away" for name in strays]


def _decoded(rows: Iterator[StoredRow]) -> Iterator[tuple[StoredRow, str | None]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(islice(rows, DECODED_TOGETHER)):
            yield from zip(chunk, pool.map(_image_fault, chunk), strict=True)


def _image_fault(row: StoredRow) -> str | None:
    if row.image is None or not row.sound:
        return f"{row.file} is missing or has another sha256 than recorded; {MAKE_AGAIN}"
    try:
        with Image.open(io.BytesIO(row.image)) as image:
            image.load()
            size = image.height, image.width
    except Exception as error:  # a decoder raises whatever it likes on damaged bytes
        return f"the image of row {row.id!r} does not decode ({error}); {MAKE_AGAIN}"
    if size != (row.height, row.width):
        return f"the image of row {row.id!r} is {size[0]}x{size[1]} where its row says {row.height}x{row.width}"
    return None


def _row_faults(planned: list[str], held: dict[ShardCommit, list[str]]) -> Iterator[str]:
    times = Counter(row_id for ids in held.values() for row_id in ids)
    faults = {
        "lacks rows of the plan": [row_id for row_id in planned if row_id not in times],
        "holds rows that are not the plan's": sorted(times.keys() - set(planned)),
        "holds rows twice, or rows that failed/ holds too": [row_id for row_id, number in times.items() if number > 1],
    }
    for fault, ids in faults.items():
        if ids:
            yield f"{fault}: {_named(ids)}; delete it and {MAKE_AGAIN}"


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    return ", ".join(map(repr, ids[:NAMED_IDS])) + more
