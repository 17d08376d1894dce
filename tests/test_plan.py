"""The arithmetic of the plan: properties over random buckets, and the rules for sizes and order."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxbatch.config import PlanConfig
from fluxbatch.plan.cut import AUTO_MAX_IMAGES, PlanPart, batch_size, plan_order, plan_part, plan_retry
from fluxbatch.records import Bucket

sides = st.integers(1, 64).map(lambda n: 16 * n)
buckets = st.builds(Bucket, sides, sides, st.integers(1, 4), st.booleans())
counts = st.dictionaries(buckets, st.integers(0, 40), max_size=6)
plans = st.builds(PlanConfig, batch_size=st.one_of(st.just("auto"), st.integers(1, 9)), shard_size=st.integers(1, 17))
parts = st.builds(
    lambda c, p, shard, batch: plan_part(c, plan=p, index=2, first_shard=shard, first_batch=batch),
    counts, plans, st.integers(0, 5), st.integers(0, 5),
)  # fmt: skip

SQUARE, WIDE = Bucket(512, 512, 28), Bucket(512, 1024, 28)


@given(parts)
def test_every_row_stands_in_exactly_one_slot_of_one_batch(part: PlanPart):
    slots = [(b.index, slot) for s in part.shards() for b in s.batches for slot in range(b.num_rows)]
    rows = [b.first_row + slot for s in part.shards() for b in s.batches for slot in range(b.num_rows)]
    assert rows == list(range(part.num_rows))
    assert len(set(slots)) == part.num_rows


@given(parts)
def test_batches_are_numbered_without_gaps_and_cross_neither_shard_nor_bucket(part: PlanPart):
    batches = [b for s in part.shards() for b in s.batches]
    bucket_of_row = [run.bucket for run in part.runs for _ in range(run.num_rows)]
    assert [b.index for b in batches] == list(range(part.first_batch, part.first_batch + part.num_batches))
    for batch in batches:
        rows = range(batch.first_row, batch.first_row + batch.num_rows)
        assert {bucket_of_row[row] for row in rows} == {batch.bucket}
        assert {row // part.shard_size + part.first_shard for row in rows} == {batch.shard}


@given(parts)
def test_every_shard_but_the_last_is_full(part: PlanPart):
    sizes = [shard.num_rows for shard in part.shards()]
    assert len(sizes) == part.num_shards == math.ceil(part.num_rows / part.shard_size)
    assert all(size == part.shard_size for size in sizes[:-1])
    assert sum(sizes) == part.num_rows


@given(parts)
def test_the_launch_size_is_fixed_in_a_bucket_and_the_rest_is_padding(part: PlanPart):
    batches = [b for s in part.shards() for b in s.batches]
    size = {run.bucket: run.batch_size for run in part.runs}
    assert all(1 <= b.num_rows <= b.size == size[b.bucket] <= part.shard_size for b in batches)
    assert part.num_padded == sum(b.size - b.num_rows for b in batches)


@given(parts)
def test_the_largest_images_come_first(part: PlanPart):
    orders = [plan_order(run.bucket) for run in part.runs]
    areas = [run.bucket.height * run.bucket.width for run in part.runs]
    assert orders == sorted(set(orders))
    assert areas == sorted(areas, reverse=True)


@given(parts, st.data())
def test_columns_of_any_range_agree_with_the_shards(part: PlanPart, data: st.DataObject):
    first = data.draw(st.integers(0, part.num_rows))
    num_rows = data.draw(st.integers(0, part.num_rows - first))
    columns = part.columns(first, num_rows)
    expected = [
        (b.bucket.name, b.index, b.shard, slot) for s in part.shards() for b in s.batches for slot in range(b.num_rows)
    ]
    found = list(zip(columns["bucket"], columns["batch"], columns["shard"], columns["slot"], strict=True))
    assert found == expected[first : first + num_rows]


@given(parts)
def test_a_part_survives_json(part: PlanPart):
    assert PlanPart.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_counting_needs_no_pass_over_the_rows():
    part = plan_part({SQUARE: 10**12, WIDE: 10**12 + 1}, plan=PlanConfig(batch_size=8, shard_size=1000))
    assert part.num_batches == 2 * (125 * 10**9 + 1)  # the odd row shifts the second bucket against the shards
    assert part.shard(part.num_shards - 1).num_rows == 1


@pytest.mark.parametrize(
    ("bucket", "setting", "size"),
    [
        (Bucket(1024, 1024, 28), "auto", 4),
        (Bucket(2048, 2048, 28), "auto", 1),
        (Bucket(4096, 4096, 28), "auto", 1),
        (Bucket(128, 128, 28), "auto", AUTO_MAX_IMAGES),
        (Bucket(128, 128, 28), 40, 40),
        (Bucket(128, 128, 28), 4000, 1000),
    ],
)
def test_auto_batches_hold_about_four_megapixels_and_no_batch_exceeds_a_shard(bucket, setting, size):
    assert batch_size(bucket, PlanConfig(batch_size=setting), num_rows=4000) == size


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (15, 15), (17, 9), (33, 11), (1600, 16)])
def test_auto_spares_padding_where_a_bucket_is_small(num_rows, size):
    bucket = Bucket(128, 128, 28)
    assert batch_size(bucket, PlanConfig(batch_size="auto"), num_rows=num_rows) == size
    assert batch_size(bucket, PlanConfig(batch_size=8), num_rows=num_rows) == 8, "a number stays as it is"


def test_br11_rows_of_one_shape_stand_together_and_its_tail_keeps_the_launch_size():
    shapes = {Bucket(256 + 16 * n, 256, 4): 9 for n in range(12)}
    part = plan_part(shapes, plan=PlanConfig(batch_size=4, shard_size=1000))
    batches = list(part.shard(0).batches)
    assert [b.num_rows for b in batches] == [4, 4, 1] * 12
    assert {b.size for b in batches} == {4}
    assert sum(a.bucket != b.bucket for a, b in pairwise(batches)) == 11


def test_a_shard_of_another_part_is_refused():
    part = plan_part({SQUARE: 5}, plan=PlanConfig(shard_size=2), first_shard=7)
    with pytest.raises(IndexError, match="shard 6"):
        part.shard(6)
    assert part.shard(9).num_rows == 1


def test_no_rows_are_no_shards():
    part = plan_part({SQUARE: 0}, plan=PlanConfig())
    assert (part.num_rows, part.num_shards, part.num_batches, part.num_padded) == (0, 0, 0, 0)
    assert list(part.shards()) == []
    assert len(part.columns(0, 0)["slot"]) == 0


def test_a_retry_follows_the_last_part_and_launches_the_first_shapes_again():
    first = plan_part({SQUARE: 5, WIDE: 3}, plan=PlanConfig(batch_size=2, shard_size=3))
    second = plan_part(
        {SQUARE: 4}, plan=PlanConfig(batch_size=4, shard_size=6), index=1,
        first_shard=first.num_shards, first_batch=first.num_batches,
    )  # fmt: skip
    retry = plan_retry({WIDE: 2, SQUARE: 1}, [first, second])
    assert (retry.index, retry.kind, retry.shard_size) == (2, "retry", 6)
    assert (retry.first_shard, retry.first_batch) == (4, first.num_batches + second.num_batches)
    assert [(run.bucket, run.num_rows, run.batch_size) for run in retry.runs] == [(WIDE, 2, 2), (SQUARE, 1, 4)]


def test_rows_and_batches_of_any_shards_are_counted_as_they_are_listed():
    counts = {Bucket(64, 64, 2): 23, Bucket(32, 32, 2): 9, Bucket(32, 48, 2): 31}
    part = plan_part(counts, plan=PlanConfig(batch_size=4, shard_size=10), first_shard=5, first_batch=70)
    for chosen in ([5], [6, 7], [5, 8, 11], list(range(5, 12))):
        listed = [batch for shard in chosen for batch in part.shard(shard).batches]
        for run, rows, batches in part.rows_in(np.array(chosen)):
            ours = [batch for batch in listed if batch.bucket == run.bucket]
            assert (rows, batches) == (sum(batch.num_rows for batch in ours), len(ours))
    assert [len(part.shard(shard).batches) for shard in range(5, 12)] == [
        len(tuple(part.shard(shard).batches)) for shard in range(5, 12)
    ]
