"""What a run is doing and what it did: `status`, report.json, report.html, contact_sheet.png and the dataset card.

Everything comes from the files of the run folder, while it runs and after. Knows no tensors, changes no data.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import writers
from fluxbatch.output.ledger import Ledger, failed_rows, row_counts
from fluxbatch.output.left import Left, left_in_folder
from fluxbatch.plan.planfile import PlanFile, RunPlan
from fluxbatch.records import Bucket, RowCounts
from fluxbatch.reports.card import dataset_card
from fluxbatch.reports.contact_sheet import draw_sheet, take_samples
from fluxbatch.reports.page import render_html, when
from fluxbatch.storage.commit import replace_file
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import live_owners
from fluxbatch.telemetry import throughput
from fluxbatch.telemetry.metrics import finite
from fluxbatch.telemetry.progress import counted, duration

LISTED_ROWS = 20  # of each reason that a row was refused or failed for
NOTHING = RowCounts(rows=0, written=0, failed=0, rejected=0, pending=0)


def status(folder: RunFolder) -> dict[str, Any]:
    """Rows by state, the rate of the last batches, and when it will be done. Unknown numbers are None.

    A row is `written` when its shard is; `in_open_shards` of the pending ones are drawn and safe on the disk.
    """
    plan = RunPlan.open(folder)
    ledger = Ledger.read(folder, plan.revisions if plan else None)
    counts = row_counts(folder, plan, ledger) if plan else NOTHING
    left, drawn = left_in_folder(folder, plan, ledger) if plan else ({}, 0)
    recent = throughput.recent_lines(folder)
    now = throughput.working(recent)
    owners = live_owners(folder)
    running = [f"{owner['host']} pid {owner['pid']} rank {owner['rank']}" for owner in owners]
    world_size = max((int(owner.get("world_size", 1)) for owner in owners), default=None)
    absent = sorted(set(range(world_size or 0)) - {int(owner.get("rank", 0)) for owner in owners})
    last_commit = max((lines[-1]["time"] for lines in recent.values()), default=None)
    return {
        "run": folder.root.name,
        **asdict(counts),
        "in_open_shards": drawn,
        "complete": plan is not None and counts.pending == 0,
        "finished": folder.success.exists(),
        "running": running,
        "world_size": world_size,
        "ranks_absent": absent,
        "not_running_since": None if running else last_commit,
        "bucket": now[min(now)][-1]["bucket"] if now else None,
        "images_per_s": finite(throughput.images_per_s(now), digits=4),
        "gpu_busy_share": finite(throughput.mean(now, "gpu_utilization_percent", scale=0.01), digits=4),
        "gpu_power_w": finite(throughput.mean(now, "gpu_power_w")),
        "eta_s": _eta_s(plan, left, now) if plan else None,
        "last_commit": last_commit,
        "last_success": folder.success.stat().st_mtime if folder.success.exists() else None,
    }


def status_words(found: Mapping[str, Any], *, now_s: float) -> str:
    """The same for a person; `now_s` is Unix time."""
    lines = [f"{key}: {found[key]}" for key in ("run", "rows", "written", "failed", "rejected")]
    drawn = found["in_open_shards"]
    pending = f"pending: {found['pending']}"
    lines += [pending + (f" ({drawn} of them drawn and safe, in shards that are still open)" if drawn else "")]
    lines += [f"state: {_state(found, now_s)}"]
    if found["running"] and found["bucket"]:
        lines += [f"bucket: {found['bucket']}"]
    if found["images_per_s"] is not None:
        lines += [f"rate: {found['images_per_s']:.3g} images/s" + ("" if found["running"] else " when it last ran")]
    if found["running"] and found["gpu_busy_share"] is not None:
        lines += [f"GPU: {found['gpu_busy_share']:.0%} in use, {_watts(found['gpu_power_w'])}"]
    if found["pending"]:
        lines += [f"time left: {_left(found)}"]
    if found["last_commit"]:
        lines += [f"last batch: {when(found['last_commit'])}, {_ago(found['last_commit'], now_s)} ago"]
    return "\n".join(lines)


def _state(found: Mapping[str, Any], now_s: float) -> str:
    running = found["running"]
    if running:
        if (found.get("world_size") or 1) == 1:
            return f"{counted(len(running), 'process', 'processes')} running: {', '.join(running)}"
        absent = ", ".join(map(str, found["ranks_absent"]))
        told = f"{len(running)} of {found['world_size']} ranks running: {', '.join(running)}"
        return told + (f"; not running: rank {absent}" if absent else "")
    if found["finished"] and found["complete"]:
        return "finished"
    since = found["not_running_since"]
    stopped = f"not running since {when(since)} ({_ago(since, now_s)})" if since else "not running, nothing drawn yet"
    return f"{stopped}; the same run command goes on"


def _left(found: Mapping[str, Any]) -> str:
    if found["eta_s"] is None:
        return "unknown, nothing has been drawn yet"
    return f"about {duration(found['eta_s'])}" + ("" if found["running"] else " once it runs again")


def _watts(power_w: float | None) -> str:
    return "power unknown" if power_w is None else f"{power_w:.0f} W"


def _ago(time: str, now_s: float) -> str:
    return duration(max(0.0, now_s - datetime.fromisoformat(time).timestamp()))


def _eta_s(plan: RunPlan, left: Mapping[Bucket, Left], ranks: Mapping[int, list[throughput.Line]]) -> int | None:
    """By pixels and steps, not rows: the largest images come first, so that rows would tell too long a time."""
    work = {run.bucket.name: run.bucket.work for part in plan.parts for run in part.runs}
    work_left = sum(bucket.work * found.rows for bucket, found in left.items())
    speed = throughput.work_per_s(ranks, work)
    return 0 if not work_left else round(work_left / speed) if speed else None


def write_report(folder: RunFolder, *, job: dict[str, Any]) -> dict[str, Any]:
    """Make report.json, report.html, contact_sheet.png and README.md anew; returns what report.json holds."""
    plan = RunPlan.open(folder)
    if plan is None:
        raise FluxbatchError(f"{folder.root} has no plan yet, so there is nothing to report")
    ledger = Ledger.read(folder, plan.revisions)
    with throughput.open_log(folder) as log:
        report = build_report(folder, plan, ledger, log=log, job=job)
    samples = take_samples(folder, plan, ledger, image_format=job["settings"]["output"]["image_format"])
    replace_file(folder.report_json, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False).encode())
    replace_file(folder.contact_sheet, _encoded(draw_sheet(samples), "PNG"))
    replace_file(folder.report_html, render_html(report, samples).encode())
    replace_file(folder.card, dataset_card(report, schema=writers.data_schema(plan.schema)))
    return report


def build_report(
    folder: RunFolder, plan: RunPlan, ledger: Ledger, *, log: throughput.Log, job: Mapping[str, Any]
) -> dict[str, Any]:
    """report.json: what became of the rows, how fast, and out of which settings."""
    counts = row_counts(folder, plan, ledger)
    rejected, failed = _rejections(folder), _failures(folder, plan, failed_rows(folder, ledger, plan))
    return {
        "run": folder.root.name,
        **asdict(counts),
        "complete": counts.pending == 0,
        "totals": throughput.totals(log),
        "occupancy": throughput.occupancy(log),
        "over_time": throughput.over_time(log),
        "buckets": _buckets(plan, throughput.by_bucket(log)),
        "reuse": plan.reuse,
        "rejected_by_reason": {reason: found["rows"] for reason, found in rejected.items()},
        "failed_by_reason": {reason: found["rows"] for reason, found in failed.items()},
        "examples": {reason: found["listed"][0]["message"] for reason, found in (rejected | failed).items()},
        "listed": {reason: found["listed"] for reason, found in (rejected | failed).items()},
        "starts": throughput.starts(folder),
        "rows_made_again": throughput.made_again(log),
        "shards": sum(part.num_shards for part in plan.parts),
        "plan_parts": [{"kind": _part_kind(file), "rows": file.part.num_rows} for file in plan.files],
        "changes": job.get("changes", []),
        "files": sum(len(lines) for lines in ledger.commits.values()),
        "bytes": _bytes(folder, ledger),
        "version": job["version"],
        "created": job["created"],
        "settings": job["settings"],
        "versions": job["versions"],
    }


def _part_kind(file: PlanFile) -> str:
    return "taken" if file.reuse and file.reuse["taken"] else file.part.kind


def _buckets(plan: RunPlan, measured: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of the plan; rows that are planned once more are no further rows."""
    unmeasured: dict[str, Any]
    unmeasured = {"images": 0, "images_per_s": None, "median_ms": {}, "ms_per_image": {}, "gpu_joules_per_image": None}
    unmeasured |= {"peak_reserved_gib": None, "out_of_memory_splits": 0, "warm_up_s": None}
    return [
        {"bucket": bucket.name, **asdict(bucket), "rows": number, **measured.get(bucket.name, unmeasured)}
        for bucket, number in plan.bucket_rows().items()
    ]


def _rejections(folder: RunFolder) -> dict[str, dict[str, Any]]:
    if not folder.rejected.exists():
        return {}
    with folder.rejected.open("rb") as source, pq.ParquetFile(source) as file:
        batches = file.iter_batches(columns=["reason", "row", "id", "message"])
        return _by_reason(pa.Table.from_batches([batch]) for batch in batches)


def _failures(folder: RunFolder, plan: RunPlan, failed: Mapping[int, set[str]]) -> dict[str, dict[str, Any]]:
    """The rows whose last word is failed, by `stage: reason`."""
    return _by_reason(_failed_rows(folder, plan, shard, ids) for shard, ids in failed.items())


def _failed_rows(folder: RunFolder, plan: RunPlan, shard: int, ids: set[str]) -> pa.Table:
    table = writers.read_parquet(folder.failed_shard(shard, plan.revisions.get(shard, 0)))
    table = table.filter(pc.is_in(table["id"], value_set=pa.array(sorted(ids), pa.string())))
    reasons = pc.binary_join_element_wise(table["stage"], table["reason"], ": ")
    return table.select(["id", "attempts", "message"]).append_column("reason", reasons)


def _by_reason(tables: Iterable[pa.Table]) -> dict[str, dict[str, Any]]:
    """How many rows each reason has, and the first of them; the most frequent first. One table in memory at a time."""
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        for reason, rows in Counter(table["reason"].to_pylist()).items():
            told = found.setdefault(reason, {"rows": 0, "listed": []})
            told["rows"] += rows
            if len(told["listed"]) < LISTED_ROWS:
                told["listed"] += _first(table, reason, LISTED_ROWS - len(told["listed"]))
    return dict(sorted(found.items(), key=lambda item: (-item[1]["rows"], item[0])))


def _first(table: pa.Table, reason: str, number: int) -> list[dict[str, Any]]:
    return table.filter(pc.equal(table["reason"], reason)).slice(0, number).drop_columns("reason").to_pylist()


def _bytes(folder: RunFolder, ledger: Ledger) -> int:
    """Of all committed files; a folder shard's images stand beside the file that the ledger names."""
    lines = [line for lines in ledger.commits.values() for line in lines]
    metadata = [folder.root / line.file for line in lines if line.file.endswith(writers.METADATA)]
    images = sum(image.bytes for path in metadata if path.exists() for image in writers.image_files(path))
    return sum(line.bytes for line in lines) + images


def _encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()
