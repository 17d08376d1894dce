"""One row of a run: where it stands, what became of it, its image out of the files. Draws nothing, changes nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.compute as pc

from fluxbatch.errors import EXIT_ROW_ERRORS, ConfigError, FluxbatchError
from fluxbatch.output import stored_images, writers
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.records import Batch, BatchPlan, ShardPlan
from fluxbatch.storage.folder import RunFolder

NEAREST = 3
PLACE_COLUMNS = ("row", "bucket", "batch", "shard", "slot", "fingerprint", "extra")


class NoImageError(FluxbatchError):
    """The row failed or was rejected: there is no image of it."""

    exit_code = EXIT_ROW_ERRORS


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row with its image as stored. `batch` holds this row alone, in a launch of the size that it was planned in."""

    row: dict[str, Any]  # its columns, the manifest's own among them
    batch: Batch
    file: Path  # the data file; of a folder its metadata.jsonl
    image_name: str
    image: bytes


def written_row(folder: RunFolder, row_id: str) -> WrittenRow:
    """Find a row and read its image. ConfigError for an id that is unknown, FluxbatchError where it has no image."""
    plan = RunPlan.open(folder)
    if plan is None:
        raise FluxbatchError(f"{folder.root} has no plan yet: run its command first")
    found = _locate(plan, row_id)
    if found is None:
        raise _unplanned(folder, plan, row_id)
    shard, place = plan.shard(found[0]), found[1]
    file = _data_file(folder, Ledger.read(folder, plan.revisions), shard, row_id)
    stored = stored_images.read_image(file, row_id)
    assert stored.image is not None, "read_image has looked"
    row = _columns(plan.rows(shard).slice(place, 1).to_pylist()[0]) | {"truncated": stored.truncated}
    batch = plan.batch(_alone(shard, place))
    return WrittenRow(row=row, batch=batch, file=file, image_name=Path(stored.file).name, image=stored.image)


def _locate(plan: RunPlan, row_id: str) -> tuple[int, int] | None:
    """The shard of a row, and its place in it; of its last attempt where it was tried again."""
    found = None
    for rows in plan.fingerprints():
        for hit in rows.filter(pc.equal(rows["id"], row_id)).to_pylist():
            found = hit["shard"], hit["place"]
    return found


def _alone(shard: ShardPlan, place: int) -> BatchPlan:
    row = shard.first_row + place
    [batch] = [batch for batch in shard.batches if 0 <= row - batch.first_row < batch.num_rows]
    return BatchPlan(batch.index, shard.index, batch.bucket, row, 1, batch.size)


def _data_file(folder: RunFolder, ledger: Ledger, shard: ShardPlan, row_id: str) -> Path:
    if not ledger.complete(shard):
        raise FluxbatchError(f"id {row_id!r} is pending: shard {shard.index} is not written yet; run the job's command")
    lines = ledger.commits[shard.index]
    for line in lines:
        if line.failed:
            _refuse_failed(folder.root / line.file, row_id)
    return next(folder.root / line.file for line in lines if line.rows)


def _refuse_failed(path: Path, row_id: str) -> None:
    rows = writers.read_parquet(path)
    for row in rows.filter(pc.equal(rows["id"], row_id)).to_pylist():
        tried = f" (tried {row['attempts']} times)" if row["attempts"] > 1 else ""
        raise NoImageError(
            f"id {row_id!r} failed in {row['stage']}{tried}: {row['reason']}: {row['message']}; "
            "run.retry_failed=true draws it again"
        )


def _unplanned(folder: RunFolder, plan: RunPlan, row_id: str) -> FluxbatchError:
    if folder.rejected.exists():
        rows = writers.read_parquet(folder.rejected)
        for row in rows.filter(pc.equal(rows["id"], row_id)).to_pylist():
            return NoImageError(f"id {row_id!r} was rejected (row {row['row']}, {row['reason']}): {row['message']}")
    nearest = ", ".join(map(repr, _nearest(plan, row_id))) or "there are none"
    return ConfigError(f"id must be one of the run's in {folder.root}, got {row_id!r}; nearest {nearest}")


def _nearest(plan: RunPlan, row_id: str) -> list[str]:
    """The ids that are most like it, of millions in seconds."""
    query = "SELECT jaro_winkler_similarity(id, $1) AS likeness, id FROM ids ORDER BY ALL DESC LIMIT $2"
    best: list[tuple[float, str]] = []
    with duckdb.connect() as connection:
        for rows in plan.fingerprints():
            connection.register("ids", rows.select(["id"]))
            best += connection.execute(query, [row_id, NEAREST]).fetchall()
            best = heapq.nlargest(NEAREST, set(best))
    return [row_id for _, row_id in best]


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the plan as it is written: with the manifest's own columns, without its place."""
    own = row.get("extra") or {}
    return {name: value for name, value in row.items() if name not in PLACE_COLUMNS} | own


def save_image(path: Path, image: bytes, *, image_format: str) -> None:
    """Write an image file for a person; one that stands there with other content is not replaced."""
    known = {".jpg", ".jpeg"} if image_format == "jpeg" else {f".{writers.EXTENSION[image_format]}"}
    if path.suffix.lower() not in known:
        raise ConfigError(f"to must end in {' or '.join(sorted(known))}, as the image does, got {path}")
    try:
        with open(path, "xb") as file:
            file.write(image)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != image:
            raise ConfigError(f"to must name a new file, and {path} stands there already with other content") from None


def columns_in_json(row: dict[str, Any]) -> dict[str, Any]:
    """A row as strict JSON."""
    return {name: writers.json_value(value) for name, value in row.items()}
