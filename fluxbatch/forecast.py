"""What a run would do, before it is paid for: rows, buckets, shards, bytes, hours, cost, memory. Writes nothing.

On a folder that holds a run already it tells what is left. Knows no weights and no tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from fluxbatch import config
from fluxbatch.config import JobConfig
from fluxbatch.errors import end_code
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output.job import Differences
from fluxbatch.output.ledger import Ledger, failed_rows, row_counts
from fluxbatch.output.left import begun_batches, left_in_folder, left_to_make
from fluxbatch.output.reuse import open_earlier
from fluxbatch.plan import deal, estimate, rates
from fluxbatch.plan.batch_size import RememberedSizes
from fluxbatch.plan.cut import PlanPart, SecondsOf, SizeOf, plan_part, plan_retry, with_seconds
from fluxbatch.plan.edits import changed_rules
from fluxbatch.plan.estimate import Hours, Memory, Spread, Work
from fluxbatch.plan.planfile import RunPlan, Supersedes
from fluxbatch.plan.planner import Since, Survey, next_part, rows_by_bucket, survey
from fluxbatch.plan.rates import Known, Observed
from fluxbatch.processes import devices
from fluxbatch.records import Bucket
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry import throughput
from fluxbatch.telemetry.metrics import finite
from fluxbatch.telemetry.progress import counted, data_size, duration

SHOWN_BUCKETS = 20
SAMPLED_SHARDS = 500
CPU = "a CPU"  # as a device of rates


def forecast(cfg: JobConfig, *, changed: Differences | None = None) -> dict[str, Any]:
    """The plan of a job, what is left of it, what that will take, and the exit code that a run would end with.

    `changed`: settings that are others than the folder's, so that all of its rows are made again.
    """
    folder, manifest = RunFolder(config.output_dir(cfg)), open_manifest(cfg.manifest)
    standing = RunPlan.open(folder)
    found = survey(manifest, config.row_rules(cfg), cfg, plan=standing, earlier=open_earlier(cfg))
    sizes, known = RememberedSizes(cfg), _known(folder, standing, cfg)
    image_s = estimate.image_seconds(cfg, known)
    part, taken = plan_part(found.counts, plan=cfg.plan, size_of=sizes), plan_part(found.taken, plan=cfg.plan)
    if standing:
        draft = _draft(standing, found.since, cfg, sizes, image_s, redo_all=bool(changed))
        draft = _with_retry(folder, draft) if cfg.run.retry_failed else draft
        there = _standing(folder, standing, found.since, changed or {}, cfg)
        work, copied, dealt = list(_left(folder, standing, draft)), found.since and found.since.taken, draft.parts
    else:
        there, work, copied, dealt = None, list(_planned(part)), found.taken, (with_seconds(part, image_s),)
    costs = _costs(work, cfg, known, copied=list(_planned(plan_part(copied or {}, plan=cfg.plan))), dealt=dealt)
    answer = _answer(found, part, taken, sizes) | {"run": there, **costs, "output_dir": str(folder.root)}
    answer |= {"exit_code": _exit_code(found, there, cfg)}
    return answer | {"ahead_of_time": _ahead_of_time(answer["buckets"]) if cfg.model.compile == "aot" else None}


def _exit_code(found: Survey, there: Mapping[str, Any] | None, cfg: JobConfig) -> int:
    """As far as it is known before a row is drawn."""
    if found.since and found.since.refusal:
        return found.since.refusal.exit_code
    tried_again = cfg.run.retry_failed or (there and there["settings_changed"])
    failed = there["failed"] if there and not tried_again else 0
    return end_code(sum(found.rejected.values()) + failed, fail_on_row_errors=cfg.run.fail_on_row_errors)


def _ahead_of_time(buckets: Sequence[Mapping[str, Any]]) -> list[str]:
    """The launch shapes that packages are needed for: steps make no other shape."""
    passes = {True: " in two passes", False: ""}
    return list(
        dict.fromkeys(
            f"{bucket['height']}x{bucket['width']}{passes[bucket['negative_pass']]}, {bucket['batch_size']} a launch"
            for bucket in buckets
        )
    )


def launches(cfg: JobConfig) -> set[tuple[Bucket, int]]:
    """Each shape that a run would launch, and the images in it, whatever of it is on the disk already."""
    folder = RunFolder(config.output_dir(cfg))
    found = survey(open_manifest(cfg.manifest), config.row_rules(cfg), cfg, earlier=open_earlier(cfg))
    part = plan_part(found.counts, plan=cfg.plan, size_of=RememberedSizes(cfg))
    standing = RunPlan.open(folder)
    if standing is None:
        return {(run.bucket, run.batch_size) for run in part.runs}
    planned = {(run.bucket, run.batch_size) for old in standing.parts for run in old.runs}
    known = {bucket for bucket, _ in planned}
    return planned | {(run.bucket, run.batch_size) for run in part.runs if run.bucket not in known}


def _answer(found: Survey, part: PlanPart, taken: PlanPart, sizes: RememberedSizes) -> dict[str, Any]:
    buckets = [
        {
            **asdict(run.bucket),
            "name": run.bucket.name,
            "rows": run.num_rows,
            "batch_size": run.batch_size,
            "batches": batches,
            "padded": batches * run.batch_size - run.num_rows,
            "measured_on": sizes.measured_on.get(run.bucket),
        }
        for run, batches in zip(part.runs, part.batches_of_runs, strict=True)
    ]
    return {
        "rows": found.rows,
        "accepted": part.num_rows + taken.num_rows,
        "rejected": sum(found.rejected.values()),
        "rejected_by_reason": dict(found.rejected),
        "rejected_examples": [asdict(example) for examples in found.examples.values() for example in examples],
        "reuse": found.reuse and {"from": found.reuse["from"], **found.reuse["rows"]},
        "to_render": part.num_rows,
        "buckets": buckets,
        "batches": part.num_batches,
        "padded": part.num_padded,
        "shards": part.num_shards + taken.num_shards,
    }


def _standing(
    folder: RunFolder, plan: RunPlan, since: Since | None, changed: Differences, cfg: JobConfig
) -> dict[str, Any]:
    """How far the run in the folder is, and what a run would find changed since."""
    ledger = Ledger.read(folder, plan.revisions)
    counts = row_counts(folder, plan, ledger)
    return {
        "written": counts.written,
        "failed": counts.failed,
        "pending": counts.pending,
        "in_open_shards": left_in_folder(folder, plan, ledger)[1],
        "manifest_unchanged": since is None,
        "defaults_changed": changed_rules(plan, config.row_rules(cfg), cfg),
        "settings_changed": changed,
        "rows_added": sum(since.added.values()) if since else 0,
        "rows_edited": since.num_edited if since else 0,
        "rows_deleted": since.num_deleted if since else 0,
        "refused": str(since.refusal) if since and since.refusal else None,
    }


def _draft(
    standing: RunPlan, since: Since | None, cfg: JobConfig, size_of: SizeOf, image_s: SecondsOf, *, redo_all: bool
) -> RunPlan:
    """The plan as a run would have it before it draws. Of one that is refused, without the edited rows."""

    def grown(plan: RunPlan, kind: str, counts: Mapping[Bucket, int], supersedes: Supersedes) -> RunPlan:
        return plan.with_part(
            next_part(counts, plan.parts[-1], cfg.plan, size_of, image_s=image_s, kind=kind), supersedes
        )

    draft = standing
    if since and since.num_edited and not since.refusal:
        draft = grown(draft, "redo", since.edited, since.places)
    if redo_all:
        draft = grown(draft, "redo", draft.bucket_rows(), dict.fromkeys(s.index for s in draft.shards() if s.num_kept))
    if since:
        draft = grown(draft, "rows", Counter(since.added) - Counter(since.taken), {})
    return draft


def _with_retry(folder: RunFolder, draft: RunPlan) -> RunPlan:
    failed = failed_rows(folder, Ledger.read(folder, draft.revisions), draft)
    counts: Counter[Bucket] = Counter()
    for bucket, rows in rows_by_bucket(draft, failed):
        counts[bucket] += rows.num_rows
    return draft.with_part(plan_retry(counts, draft.parts), {}) if counts else draft


def _planned(part: PlanPart) -> Iterator[Work]:
    for run, batches in zip(part.runs, part.batches_of_runs, strict=True):
        yield Work(run.bucket, run.num_rows, batches * run.batch_size)


def _left(folder: RunFolder, standing: RunPlan, draft: RunPlan) -> Iterator[Work]:
    """What is not on the disk of the planned batches, and all of the parts that a run would add."""
    ledger = Ledger.read(folder, standing.revisions)
    begun = (draft.shard(shard.index) for shard in standing.shards() if not ledger.complete(shard))
    added = chain.from_iterable(map(draft.shards_of, draft.parts[len(standing.parts) :]))
    left, _ = left_to_make(draft, chain(begun, added), begun_batches(folder))
    return (Work(bucket, of_bucket.rows, of_bucket.launched) for bucket, of_bucket in left.items() if of_bucket.rows)


def _known(folder: RunFolder, plan: RunPlan | None, cfg: JobConfig) -> list[Known]:
    """What this folder's own log has measured, and for other shapes what the user's cache remembers."""
    remembered = rates.recall(cfg)
    if plan is None:
        return remembered
    own = _observe(folder, plan, cfg)
    device = next((start["gpu"] for start in reversed(throughput.starts(folder)) if "gpu" in start), None)
    known = [Known(bucket, device or CPU, (seen,)) for bucket, seen in own.items()]
    return known + [of for of in remembered if of.bucket not in own and of.device == (device or CPU)]


def _costs(
    work: Sequence[Work], cfg: JobConfig, known: Sequence[Known], *, copied: Sequence[Work], dealt: Sequence[PlanPart]
) -> dict[str, Any]:
    """Hours, price and memory of what is to be drawn, and bytes of that and of what an earlier run gives."""
    size, size_rests_on = estimate.image_bytes([*work, *copied], cfg, known, codec=rates.codec(cfg.output))
    hours = estimate.gpu_hours(work, cfg, known)
    largest = max((part.bucket for part in work), key=lambda bucket: bucket.height * bucket.width, default=None)
    return {
        "to_draw": sum(part.rows for part in work),
        "image_bytes": round(size.likely),
        "image_bytes_range": [round(size.low), round(size.high)],
        "image_bytes_rest_on": size_rests_on,
        **_times(hours, cfg, dealt),
        "memory": _memory(estimate.memory(cfg, known, largest=largest)),
    }


def _times(hours: Hours | None, cfg: JobConfig, dealt: Sequence[PlanPart]) -> dict[str, Any]:
    ranks, price = _num_ranks(cfg), cfg.run.gpu_hour_price
    loads = deal.loads(dealt, ranks)
    longest = max(loads) / sum(loads) if sum(loads) else 1 / ranks
    gpu = hours.gpu if hours else None
    return {
        "hours": gpu.likely if gpu else None,
        "gpu_hours": _range(gpu),
        "ranks": ranks,
        "wall_hours": _range(gpu * longest if gpu else None),
        "hours_rest_on": {ground: finite(share) for ground, share in hours.rests_on.items()} if hours else {},
        "gpu_hour_price": price,
        "cost": _range(gpu * price if gpu and price is not None else None),
    }


def _num_ranks(cfg: JobConfig) -> int:
    """As the settings tell; of `run.devices=all` what CUDA_VISIBLE_DEVICES names, for no driver is asked here."""
    words = [] if cfg.run.devices is None else devices.named(cfg.run.devices)
    if words == ["all"]:
        words = devices.visible_gpus(os.environ) if devices.VISIBLE in os.environ else []
    return (cfg.run.world_size or 1) * max(1, len(words))


def _range(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def _memory(found: Memory | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "fits": found.fits}


# In words.


def words(answer: Mapping[str, Any]) -> str:
    """The same for a person."""
    lines = [f"{key}: {answer[key]:,}" for key in ("rows", "accepted", "rejected")]
    lines += [f"  {reason}: {number:,}" for reason, number in answer["rejected_by_reason"].items()]
    lines += [f"    row {e['row']}, id {e['id']}: {e['message']}" for e in answer["rejected_examples"]]
    lines += _reuse_lines(answer)
    lines += _bucket_lines(answer["buckets"])
    lines += _ahead_lines(answer["ahead_of_time"])
    lines += [f"batches: {answer['batches']:,} ({answer['padded']:,} padded places)", f"shards: {answer['shards']:,}"]
    lines += _run_lines(answer)
    low, high = answer["image_bytes_range"]
    lines += [
        f"bytes: about {data_size(answer['image_bytes'])} of images, {data_size(low)} to {data_size(high)} "
        f"({answer['image_bytes_rest_on']})"
    ]
    return "\n".join(
        [*lines, *_hour_lines(answer), *_memory_lines(answer["memory"]), f"output: {answer['output_dir']}"]
    )


def _reuse_lines(answer: Mapping[str, Any]) -> list[str]:
    found = answer["reuse"]
    if not found:
        return []
    why = ", ".join(f"{found[state]:,} {state}" for state in ("changed", "added", "unwritten") if found[state])
    return [
        f"reused: {found['reused']:,} images of {found['from']}"
        + (f"; {counted(found['removed'], 'row')} of it no longer in the manifest" if found["removed"] else ""),
        f"to render: {answer['to_render']:,}" + (f" ({why})" if why else ""),
    ]


def _bucket_lines(buckets: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"buckets: {len(buckets):,}"]
    for bucket in buckets[:SHOWN_BUCKETS]:
        line = (
            f"  {bucket['name']}: {counted(bucket['rows'], 'row')} in {counted(bucket['batches'], 'batch', 'batches')}"
        )
        line += f" of {bucket['batch_size']}" + (f", {bucket['padded']:,} padded" if bucket["padded"] else "")
        lines += [line + (f" (measured on {bucket['measured_on']})" if bucket["measured_on"] else "")]
    more = buckets[SHOWN_BUCKETS:]
    if more:
        rows, batches = sum(bucket["rows"] for bucket in more), sum(bucket["batches"] for bucket in more)
        told = f"{counted(rows, 'row')} in {counted(batches, 'batch', 'batches')}"
        lines += [f"  and {len(more):,} smaller ones: {told} (--json has them all)"]
    return lines


def _ahead_lines(shapes: Sequence[str] | None) -> list[str]:
    if not shapes:
        return []
    told = "`python -m fluxbatch compile` makes what is missing of their blocks and decoder"
    return [f"compiled ahead of time: {counted(len(shapes), 'launch shape')}; {told}", *(f"  {s}" for s in shapes)]


def _run_lines(answer: Mapping[str, Any]) -> list[str]:
    run = answer["run"]
    if run is None:
        return []
    line = f"already there: {run['written']:,} written, {run['failed']:,} failed"
    line += f", {run['in_open_shards']:,} in open shards" if run["in_open_shards"] else ""
    left = counted(answer["to_draw"], "row")
    lines = [line, *_change_lines(run, answer["exit_code"])]
    return [*lines, f"left to draw: {left}; what follows is for them" if answer["to_draw"] else "left to draw: nothing"]


def _change_lines(run: Mapping[str, Any], exit_code: int) -> list[str]:
    lines = []
    if not run["manifest_unchanged"]:
        told = (
            f"{counted(run['rows_added'], 'row')} added, {run['rows_edited']:,} edited, {run['rows_deleted']:,} deleted"
        )
        lines += [f"since it was planned: {told} (which are kept)"]
    if run["settings_changed"]:
        told = ", ".join(f"{key} was {of['was']!r}, is {of['is']!r}" for key, of in run["settings_changed"].items())
        lines += [f"all rows are made again: {told}"]
    elif run["rows_edited"] and not run["refused"]:
        lines += ["edited rows are made again"]
    return [*lines, f"a run would end with {exit_code}: {run['refused']}"] if run["refused"] else lines


def _hour_lines(answer: Mapping[str, Any]) -> list[str]:
    gpu, wall, cost = answer["gpu_hours"], answer["wall_hours"], answer["cost"]
    if gpu is None:
        return ["hours: unknown for this model; the first run measures them"]
    grounds = [
        ground if share > 0.995 else f"{ground} ({share:.0%})" for ground, share in answer["hours_rest_on"].items()
    ]
    rests = f" ({'; '.join(grounds)})" if grounds else ""
    lines = [f"GPU hours: about {_hours(gpu)}{rests}"]
    ranks = counted(answer["ranks"], "rank")
    if 0 < answer["shards"] < answer["ranks"]:
        ranks += f" on {counted(answer['shards'], 'shard')}, which is never divided (plan.shard_size)"
    lines += [f"wall time: about {_durations(wall)} with {ranks}, without loading the model"]
    if cost is not None:
        lines += [f"cost: about {_hours(cost)} at {answer['gpu_hour_price']:g} a GPU hour"]
    return lines


def _hours(of: Mapping[str, float]) -> str:
    return f"{of['likely']:,.3g}, {of['low']:,.3g} to {of['high']:,.3g}"


def _durations(of: Mapping[str, float]) -> str:
    return f"{duration(of['likely'] * 3600)}, {duration(of['low'] * 3600)} to {duration(of['high'] * 3600)}"


def _memory_lines(memory: Mapping[str, Any] | None) -> list[str]:
    if memory is None:
        return []
    line = f"peak memory: about {memory['peak_gib']:.1f} GiB of the GPU ({memory['rests_on']}"
    line += f"; weights {memory['weights_gib']:.1f}" + (", text encoder windowed)" if memory["windowed"] else ")")
    if memory["fits"] is None:
        return [line]
    verdict = "fits" if memory["fits"] else "does not fit"
    return [f"{line}: {verdict} into model.memory_budget_gib={memory['budget_gib']:g}"]


# What this run measured, for the plans of others.


def remember_rates(folder: RunFolder, plan: RunPlan, cfg: JobConfig, *, device: str | None, rank: int | None) -> None:
    """Keep the rates and sizes of a rank's log, or of all, where later plans look for them."""
    rates.remember(cfg, device=device or CPU, observed=_observe(folder, plan, cfg, rank=rank))


def _observe(folder: RunFolder, plan: RunPlan, cfg: JobConfig, *, rank: int | None = None) -> dict[Bucket, Observed]:
    buckets = {run.bucket.name: run.bucket for part in plan.parts for run in part.runs}
    log = throughput.read_log(folder, rank=rank)
    shared: dict[str, Any] = {
        "run": str(folder.root),
        "time": throughput.totals(log)["last_time"] or "",
        "codec": rates.codec(cfg.output),
        "bytes_per_pixel": _bytes_per_pixel(folder, plan),
    }
    measured = [row for row in throughput.launches(log) if row["bucket"] in buckets]
    return {
        buckets[row["bucket"]]: Observed(**shared, **{key: row[key] for key in row if key != "bucket"})
        for row in measured
    }


def _bytes_per_pixel(folder: RunFolder, plan: RunPlan) -> float | None:
    """Of the shards that are committed, with all that stands in them; of many, some evenly spread ones."""
    ledger = Ledger.read(folder, plan.revisions)
    pixels = size = 0
    committed = sorted(shard for shard, lines in ledger.commits.items() if any(line.rows for line in lines))
    for shard in map(plan.shard, committed[:: -(-len(committed) // SAMPLED_SHARDS) or 1]):
        lines = [line for line in ledger.commits[shard.index] if line.rows]
        rows = sum(batch.num_rows for batch in shard.batches)
        area = sum(batch.num_rows * batch.bucket.height * batch.bucket.width for batch in shard.batches)
        if rows:
            pixels += area * sum(line.rows for line in lines) // rows
            size += sum(line.bytes for line in lines)
    return size / pixels if pixels else None
