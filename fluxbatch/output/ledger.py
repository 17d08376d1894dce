"""What is committed: one JSON line for each data or failed file, in one ledger a rank. Knows no tensors, no settings.

A line names a file with its rows, bytes and sha256. For a folder shard that file is its `metadata.jsonl`, which holds
the size and SHA-256 of each image beside it. A line with 0 bytes takes back the line of the same file and mtime_ns:
the file was lost, and is to be made again. A line holds the CRC of its own fields: one that was altered on the disk
says nothing, and its shard, which is sound, is taken back by the next start.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import shards, writers
from fluxbatch.records import RowCounts, ShardCommit, ShardPlan
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder, revision_of, shard_of
from fluxbatch.storage.lines import append_lines, read_lines, text_lines

if TYPE_CHECKING:
    from fluxbatch.plan.planfile import RunPlan

COLUMNS = [field.name for field in fields(ShardCommit)]
COLUMN_TYPES = [str if name in ("file", "sha256") else int for name in COLUMNS]
CRC = "crc32"
STATS_TOGETHER = 16
STATS_CHUNK = 64  # for one thread


@dataclass
class Ledger:
    """The committed files of a run folder, by shard, as all ranks have written them down.

    `superseded` holds the lines of revisions before the one that the plan asks for: their files are to be replaced.
    """

    commits: dict[int, tuple[ShardCommit, ...]] = field(default_factory=dict)
    revisions: Mapping[int, int] = field(default_factory=dict)
    superseded: dict[int, tuple[ShardCommit, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: RunFolder, revisions: Mapping[int, int] | None = None) -> Ledger:
        """Read the ledgers of all ranks. Torn and foreign lines are passed over; the last line of a file counts.

        `revisions`: that of each shard which a redo has taken rows from (`RunPlan.revisions`).
        """
        ledger = cls(revisions=revisions or {})
        lines = [line for path in sorted(folder.ledgers.glob("rank-*.jsonl")) for line in _lines(path)]
        taken_back = {(line.file, line.mtime_ns) for line in lines if line.bytes == 0}
        ledger._add(line for line in lines if (line.file, line.mtime_ns) not in taken_back)
        return ledger

    def append(self, folder: RunFolder, rank: int, commits: list[ShardCommit]) -> None:
        """Write a shard's lines down, in one write."""
        append_lines(folder.ledger(rank), list(map(_record, commits)))
        commit.step("ledger", folder.ledger(rank))
        self._add(commits)

    def forget(self, folder: RunFolder, rank: int, lost: ShardCommit) -> None:
        """Take back the line of a file that is lost."""
        append_lines(folder.ledger(rank), [_record(replace(lost, rows=0, failed=0, bytes=0, sha256=""))])
        self.commits[lost.shard] = tuple(line for line in self.commits[lost.shard] if line.file != lost.file)

    def complete(self, shard: ShardPlan) -> bool:
        """Whether the shard's lines account for each of its rows."""
        return self.accounted(shard) == shard.num_kept

    def accounted(self, shard: ShardPlan) -> int:
        """How many rows of a shard its lines account for."""
        return sum(line.rows + line.failed for line in self.commits.get(shard.index, ()))

    def _add(self, lines: Iterable[ShardCommit]) -> None:
        for line in lines:
            is_current = revision_of(line.file) == self.revisions.get(line.shard, 0)
            commits = self.commits if is_current else self.superseded
            others = (other for other in commits.get(line.shard, ()) if other.file != line.file)
            commits[line.shard] = (*others, line)


def _lines(path: Path) -> Iterator[ShardCommit]:
    for record in read_lines(path):
        line = _line(record)
        if line is not None:
            yield line


def _record(line: ShardCommit) -> dict[str, Any]:
    record = asdict(line)
    return {**record, CRC: _crc(list(record.values()))}


def _crc(values: list[Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _line(record: dict[str, Any]) -> ShardCommit | None:
    """A ledger line; None for a JSON object that is something else, or was altered. Older ones have no CRC."""
    values = list(map(record.get, COLUMNS))
    if list(map(type, values)) != COLUMN_TYPES or record.get(CRC, _crc(values)) != _crc(values):
        return None
    line = ShardCommit(*values)  # type: ignore[arg-type]
    return line if shard_of(line.file) == line.shard else None


def torn_lines(folder: RunFolder) -> list[str]:
    """Where the ledgers hold lines that say nothing: torn by a kill, or altered."""
    return [
        f"{path.relative_to(folder.root).as_posix()} line {number}"
        for path in sorted(folder.ledgers.glob("rank-*.jsonl"))
        for number, text in enumerate(text_lines(path), 1)
        if text.strip() and not _says_something(text)
    ]


def _says_something(text: bytes) -> bool:
    try:
        record = json.loads(text)
    except ValueError:
        return False
    return isinstance(record, dict) and _line(record) is not None


def check_files(
    folder: RunFolder, ledger: Ledger, *, ours: Callable[[int], bool] = lambda shard: True
) -> list[ShardCommit]:
    """The lines of our shards whose file is missing or cut: to be removed, forgotten and made again.

    A file that is longer or other than its line raises FluxbatchError with its name. One of the same size and
    modification time is not read. Many are asked for at once: on a network file system each answer takes a while.
    """
    lines = [line for shard, lines in ledger.commits.items() if ours(shard) for line in lines]
    chunks = [lines[at : at + STATS_CHUNK] for at in range(0, len(lines), STATS_CHUNK)]
    with ThreadPoolExecutor(STATS_TOGETHER) as pool:
        lost = pool.map(lambda chunk: [line for line in chunk if _is_lost(folder, line)], chunks)
        return [line for found in lost for line in found]


def _is_lost(folder: RunFolder, line: ShardCommit) -> bool:
    path = folder.root / line.file
    try:
        stat = path.stat()
    except FileNotFoundError:
        return True
    if stat.st_size < line.bytes:
        return True
    _require_same(path, stat, line)
    if path.name != writers.METADATA:
        return False
    if shards.is_cut(path, line):
        return True
    _require_same_images(path)
    return False


def _require_same(path: Path, stat: os.stat_result, line: ShardCommit) -> None:
    if stat.st_size == line.bytes and (stat.st_mtime_ns == line.mtime_ns or commit.sha256_file(path) == line.sha256):
        return
    raise FluxbatchError(
        f"{path} is not the file that its ledger line names; restore it, or let `verify --repair` set it aside, "
        "and the same run command makes its rows again"
    )


def _require_same_images(metadata: Path) -> None:
    written_ns = metadata.stat().st_mtime_ns  # after its images: only a later one was touched
    for image in writers.image_files(metadata):
        is_touched = image.size() != image.bytes or image.path.stat().st_mtime_ns > written_ns
        if is_touched and commit.sha256_file(image.path) != image.sha256:
            raise FluxbatchError(
                f"{image.path} is not the image that {metadata.name} names; restore it, or let `verify --repair` set "
                "it aside, and the same run command makes its rows again"
            )


def failed_rows(folder: RunFolder, ledger: Ledger, plan: RunPlan) -> dict[int, set[str]]:
    """By shard, the ids of the rows whose last word is failed. A planned retry takes the word from earlier attempts."""
    failed_in: dict[str, int] = {}
    for part in plan.parts:
        for shard in plan.shards_of(part):
            for row_id in shards.kept_ids(shard, plan.rows(shard)) if part.kind == "retry" else ():
                failed_in.pop(row_id, None)
            if ledger.complete(shard):
                failed_in |= dict.fromkeys(_failed_ids(folder, ledger, shard), shard.index)
    failed: defaultdict[int, set[str]] = defaultdict(set)
    for row_id, index in failed_in.items():
        failed[index].add(row_id)
    return dict(failed)


def _failed_ids(folder: RunFolder, ledger: Ledger, shard: ShardPlan) -> set[str]:
    lines = [line for line in ledger.commits.get(shard.index, ()) if line.failed]
    return {row_id for line in lines for row_id in writers.stored_ids(folder.root / line.file)}


def attempts(folder: RunFolder, ledger: Ledger, *, before_shard: int) -> dict[str, int]:
    """How often each row has been tried that failed in a shard below this one."""
    tried: dict[str, int] = {}
    for shard in sorted(shard for shard in ledger.commits if shard < before_shard):
        for line in (line for line in ledger.commits[shard] if line.failed):
            rows = writers.read_parquet(folder.root / line.file, ["id", "attempts"])
            tried.update(zip(rows["id"].to_pylist(), rows["attempts"].to_pylist(), strict=True))
    return tried


def row_counts(folder: RunFolder, plan: RunPlan, ledger: Ledger) -> RowCounts:
    """The rows by state, from plan and ledger. A row is what its last planned attempt is: pending in an open shard."""
    written = failed = pending = 0
    for part in plan.parts:
        for shard in plan.shards_of(part):
            lines, kept = ledger.commits.get(shard.index, ()), shard.num_kept
            is_complete = sum(line.rows + line.failed for line in lines) == kept
            written += sum(line.rows for line in lines) if is_complete else 0
            failed += sum(line.failed for line in lines) if is_complete else 0
            failed -= kept if part.kind == "retry" else 0
            pending += 0 if is_complete else kept
    return RowCounts(
        rows=plan.num_rows + plan.num_rejected,
        written=written,
        failed=failed,
        rejected=plan.num_rejected,
        pending=pending,
    )
