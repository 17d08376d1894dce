"""A plan of small rows and the batches that a pipeline would make of them, for shards, ledger and verify."""

import io
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa
from PIL import Image

from fluxbatch.config import OutputConfig, PlanConfig
from fluxbatch.output import shards
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan.cut import PlanPart, plan_part
from fluxbatch.records import (
    Batch,
    BatchPlan,
    Bucket,
    CompressedBatch,
    Request,
    RowFailure,
    RowResult,
    ShardCommit,
    ShardPlan,
)
from fluxbatch.storage.folder import RunFolder

BUCKET = Bucket(16, 24, 2)
FAILURE = RowFailure("decode", "non_finite", "NaN in the pixels", attempts=1)


def output(kind: str = "parquet", **others: object) -> OutputConfig:
    return OutputConfig(kind=kind, **others)  # type: ignore[arg-type]


def png(number: int, *, height: int = BUCKET.height, width: int = BUCKET.width) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (number % 256, number // 256 % 256, 99)).save(file, "png")
    return file.getvalue()


class FakePlan:
    """What `RunPlan` gives to its readers, held in memory."""

    num_rejected = 0
    planned: ClassVar[dict[str, str]] = {}
    revisions: ClassVar[dict[int, int]] = {}

    def __init__(self, ids: Sequence[str], *, shard_size: int = 4, extra: pa.Array | None = None) -> None:
        self.cfg = PlanConfig(batch_size=2, shard_size=shard_size)
        self.parts: tuple[PlanPart, ...] = ()
        self._tables: list[pa.Table] = []
        self.add(ids, extra=extra)

    def add(self, ids: Sequence[str], *, kind: str = "rows", extra: pa.Array | None = None) -> None:
        first_shard = sum(part.num_shards for part in self.parts)
        first_batch = sum(part.num_batches for part in self.parts)
        part = plan_part(
            {BUCKET: len(ids)},
            plan=self.cfg,
            index=len(self.parts),
            kind=kind,
            first_shard=first_shard,
            first_batch=first_batch,
        )
        self.parts += (part,)
        self._tables.append(plan_table(ids, extra=extra))

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts if part.kind == "rows")

    def shards(self) -> list[ShardPlan]:
        return [shard for part in self.parts for shard in part.shards()]

    def shards_of(self, part: PlanPart) -> list[ShardPlan]:
        return list(part.shards())

    def part(self, shard: int) -> PlanPart:
        return next(part for part in reversed(self.parts) if part.first_shard <= shard)

    def shard(self, index: int) -> ShardPlan:
        return self.shards()[index]

    def rows(self, shard: ShardPlan) -> pa.Table:
        [part] = [p for p in self.parts if p.first_shard <= shard.index < p.first_shard + p.num_shards]
        return self._tables[part.index].slice(shard.first_row, shard.num_rows)

    def batch(self, plan: BatchPlan) -> Batch:
        shard = self.shard(plan.shard)
        rows = self.rows(shard).slice(plan.first_row - shard.first_row, plan.num_rows)
        names = list(Request.__slots__)
        return Batch(plan, tuple(Request(**row) for row in rows.select(names).to_pylist()))


def plan_table(ids: Sequence[str], *, extra: pa.Array | None = None) -> pa.Table:
    size = len(ids)
    columns = {
        "id": pa.array(ids, pa.string()),
        "prompt": pa.array([f"prompt of {row_id}" for row_id in ids], pa.string()),
        "negative_prompt": pa.nulls(size, pa.string()),
        "height": pa.array([BUCKET.height] * size, pa.int32()),
        "width": pa.array([BUCKET.width] * size, pa.int32()),
        "num_inference_steps": pa.array([BUCKET.num_inference_steps] * size, pa.int32()),
        "guidance_scale": pa.array([3.5] * size, pa.float64()),
        "seed": pa.array(range(size), pa.int64()),
    }
    return pa.table(columns | ({"extra": extra} if extra is not None else {}))


def finished(plan: FakePlan, batch: BatchPlan, *, failing: Sequence[str] = ()) -> CompressedBatch:
    """The batch after the pipeline; each image shows its row's seed."""
    made = plan.batch(batch)
    results = [
        RowResult(request.id, None, failure=FAILURE)
        if request.id in failing
        else RowResult(request.id, png(request.seed), truncated=request.seed == 1)
        for request in made.requests
    ]
    return CompressedBatch(made, tuple(results))


def commit_batches(folder: RunFolder, plan: FakePlan, shard: int, *, failing: Sequence[str] = ()) -> None:
    for batch in plan.shard(shard).batches:
        shards.commit_batch(folder, finished(plan, batch, failing=failing))


def compact(folder: RunFolder, plan: FakePlan, shard: int, *, cfg: OutputConfig) -> list[ShardCommit]:
    found = plan.shard(shard)
    return shards.compact(folder, found, plan.rows(found), output=cfg)


def finish(
    folder: RunFolder, plan: FakePlan, ledger: Ledger, *, cfg: OutputConfig, failing: Sequence[str] = ()
) -> None:
    """Do whatever is still to be done, as a run does it."""
    for shard in plan.shards():
        if not ledger.complete(shard):
            commit_batches(folder, plan, shard.index, failing=failing)
            ledger.append(folder, 0, compact(folder, plan, shard.index, cfg=cfg))
            shards.remove_batches(folder, shard)
