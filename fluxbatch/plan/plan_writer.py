"""Writing the plan files and rejected.parquet, once, in plan order. Reads no plan, knows no duplicates and no edits.

Row groups hold whole shards, few enough for a rank to read little beside its own, and there are never so many of them
that a footer is long to read.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.errors import ManifestError
from fluxbatch.manifest.rows import SEED
from fluxbatch.plan.cut import PlanPart
from fluxbatch.plan.planfile import FOOTER
from fluxbatch.records import Rejection
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

MAX_GROUPS = 4096  # 17 columns each: a footer of 4.5 MB, read in 0.04 s; 8192 took 0.2 s, and 0.04 s more a group
GROUP_ROWS = 8192, 65_536  # at least, at most in one row group of a plan file, and
GROUP_BYTES = 64 * 2**20  # its text: a reader holds two groups
SEED_RANGES = {pa.int64(): (-(2**63), 2**63 - 1), pa.uint64(): (0, 2**64 - 1), SEED: (-(2**63), 2**64 - 1)}
REQUESTED = {"requested_height": pa.int32(), "requested_width": pa.int32()}


def plan_schema(extra: pa.Schema, *, seeds: tuple[int, int], floored: bool) -> pa.Schema:
    """The schema of a first plan, whose seeds lie in this range; with requested sizes if rows may be `floored`."""
    low, high = seeds
    seed_type = next(kind for kind, (least, most) in SEED_RANGES.items() if least <= low and high <= most)
    return pa.schema(
        {
            "id": pa.string(),
            "prompt": pa.string(),
            "negative_prompt": pa.string(),
            "height": pa.int32(),
            "width": pa.int32(),
            "num_inference_steps": pa.int32(),
            "guidance_scale": pa.float64(),
            "seed": seed_type,
            **(REQUESTED if floored else {}),
            **({"extra": pa.struct(list(extra))} if len(extra) else {}),
            "row": pa.int64(),
            "bucket": pa.string(),
            "batch": pa.int64(),
            "shard": pa.int64(),
            "slot": pa.int64(),
            "fingerprint": pa.string(),
        }
    )


def publish_part(
    folder: RunFolder,
    part: PlanPart,
    rows: Iterable[pa.Table],
    *,
    schema: pa.Schema,
    identity: dict[str, Any],
    supersedes: Mapping[int, Sequence[int] | None] | None = None,
    settings: dict[str, Any] | None = None,
    reuse: dict[str, Any] | None = None,
) -> bool:
    """Write accepted rows, which come in plan order. False when another process has published this part.

    A redo says which places of which shards its rows supersede, and the settings that hold from here on if they are
    others: all of it becomes true with this one file. `reuse` says what an earlier run has of the rows.
    """
    redo = {"supersedes": supersedes, "settings": settings} if supersedes is not None else {}
    footer = {"part": part.to_json(), **redo, **({"reuse": reuse} if reuse else {}), **identity}
    schema = schema.with_metadata({FOOTER: json.dumps(footer).encode()})

    def write(file: BinaryIO) -> None:
        first_row = 0
        with pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["bucket"],
            write_statistics=False,
            write_page_checksum=True,
        ) as writer:
            for group in _grouped(rows, group_rows(part)):
                writer.write_table(_placed(group, part, first_row, schema))
                first_row += group.num_rows
        assert first_row == part.num_rows, f"{first_row} rows for a plan of {part.num_rows}"

    folder.success.unlink(missing_ok=True)  # a plan that grows is not done
    return commit.publish_file(folder.plan(part.index), write)


def group_rows(part: PlanPart) -> int:
    """Rows in a row group: whole shards, unless one is larger than a reader should hold."""
    least, most = GROUP_ROWS
    shards = max(-(-part.num_shards // MAX_GROUPS), least // part.shard_size, 1)
    return min(shards * part.shard_size, most)


def _grouped(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of a row group's size."""
    held: list[pa.Table] = []
    for table in tables:
        while table.num_rows:
            room = num_rows - sum(part.num_rows for part in held)
            held.append(table.slice(0, room))
            table = table.slice(room)
            if held[-1].num_rows == room or sum(part.nbytes for part in held) >= GROUP_BYTES:
                yield pa.concat_tables(held)
                held = []
    if held:
        yield pa.concat_tables(held)


def _placed(rows: pa.Table, part: PlanPart, first_row: int, schema: pa.Schema) -> pa.Table:
    """Rows with their places in the plan, in the plan file's schema."""
    columns = _fitted(rows, schema)
    columns.update({name: pa.array(values) for name, values in part.columns(first_row, rows.num_rows).items()})
    return pa.table({name: columns[name] for name in schema.names}).cast(schema)


# What added rows must keep to: the columns and types of the first plan, for they are those of all shards.


def unfitting(rows: Iterable[pa.Table], schema: pa.Schema) -> ManifestError | None:
    """Why these rows cannot be added to a plan of this schema; None where they can."""
    try:
        for table in rows:
            _fitted(table, schema)
    except ManifestError as error:
        return error
    return None


def _fitted(rows: pa.Table, schema: pa.Schema) -> dict[str, pa.ChunkedArray]:
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns["seed"] = _fitting_seeds(columns["seed"], schema)
    if "requested_height" in columns and "requested_height" not in schema.names:
        _refuse_floored(columns["requested_height"])
    if "extra" in columns or "extra" in schema.names:
        columns["extra"] = _fitting_extra(columns.get("extra"), rows.num_rows, schema)
    return columns


def _fitting_seeds(seeds: pa.ChunkedArray, schema: pa.Schema) -> pa.ChunkedArray:
    kind = schema.field("seed").type
    try:
        return seeds.cast(kind)
    except pa.ArrowInvalid as error:
        least, most = SEED_RANGES[kind]
        bad = next(seed for seed in seeds.to_pylist() if not least <= seed <= most)
        raise ManifestError(
            f"seeds of added rows must fit {kind}, the type that this run began with, got {bad}; use another output.dir"
        ) from error


def _refuse_floored(requested: pa.ChunkedArray) -> None:
    if requested.null_count < len(requested):
        raise ManifestError(
            "manifest.size_policy must stay reject, for this run began with it and has no place for requested sizes, "
            "got floor; use another output.dir"
        )


def _fitting_extra(extra: pa.ChunkedArray | None, num_rows: int, schema: pa.Schema) -> pa.ChunkedArray:
    known = schema.field("extra").type if "extra" in schema.names else pa.struct([])
    if extra is None:
        return pa.nulls(num_rows, known)
    new = [name for name in extra.type.names if name not in known.names]
    hint = "leave it out with manifest.drop_columns, or use another output.dir"
    if new:
        raise ManifestError(f"column {new[0]} is not in the plan that this run began with; {hint}")
    try:
        return extra.cast(known)
    except pa.ArrowException as error:
        raise ManifestError(
            f"a column has another type than in the plan that this run began with: {error}; {hint}"
        ) from error


class RejectedFile:
    """Builds rejected.parquet on disk until it is complete; its footer says which manifest and rules it belongs to."""

    schema = pa.schema({"row": pa.int64()} | {name: pa.string() for name in ("id", "column", "reason", "message")})

    def __init__(self, identity: dict[str, Any]) -> None:
        self._file = tempfile.TemporaryFile(prefix="fluxbatch-")  # noqa: SIM115 - until close
        schema = self.schema.with_metadata({FOOTER: json.dumps(identity).encode()})
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._held: list[Rejection] = []

    def add(self, rejections: Iterable[Rejection]) -> None:
        for rejection in rejections:
            self._held.append(rejection)
            if len(self._held) == GROUP_ROWS[1]:
                self._flush()

    def publish(self, folder: RunFolder) -> None:
        """Finish the file, and put it in the place of the one before."""
        self._flush()
        self._writer.close()
        with self._file as content:
            content.seek(0)
            commit.replace_file(folder.rejected, lambda file: shutil.copyfileobj(content, file))

    def _flush(self) -> None:
        rows = pa.Table.from_pylist([asdict(rejection) for rejection in self._held], self._writer.schema)
        self._writer.write_table(rows)
        self._held = []
