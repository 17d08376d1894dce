"""status, report.json, report.html, the contact sheet and the dataset card, from the files of real run folders."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image, ImageFont

from fluxbatch.config import (
    JobConfig,
    ModelConfig,
    ModelPreset,
    OutputConfig,
    PipelineConfig,
    PlanConfig,
    SamplerConfig,
    row_rules,
)
from fluxbatch.errors import FluxbatchError
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output import shards
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.planner import add_retry, prepare
from fluxbatch.records import Batch, BatchPlan, CompressedBatch, RowFailure, RowResult, StageTimes
from fluxbatch.reports import report
from fluxbatch.reports.card import dataset_card, json_feature, size_category
from fluxbatch.reports.contact_sheet import draw_sheet, fair_shares, read_images, take_samples, wrap
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry import throughput
from fluxbatch.telemetry.metrics import GpuSampler, MetricsLog, record_start
from fluxbatch.telemetry.progress import one_line

KINDS = ["parquet", "webdataset", "folder"]
HOSTILE = '<script>alert(1)</script> "><img src=x onerror=alert(2)> | `a` \n\x1b[31m{{ 7 * 7 }} 李明 👩‍🚀'
WALL_S = 0.5


@dataclass
class Run:
    """A run folder made through the real modules, with images that show their row's size and seed."""

    folder: RunFolder
    cfg: JobConfig
    plan: RunPlan
    ledger: Ledger

    def do(self, *, failing: Sequence[str] = (), batches: int | None = None, wall_s: float = WALL_S) -> None:
        """Make all batches that are missing, or the first few of them; shards are closed as they fill."""
        log = MetricsLog(self.folder, 0, GpuSampler(False, None))
        for shard in self.plan.shards():
            for batch in () if self.ledger.complete(shard) else shard.batches:
                if batches == 0:
                    return
                batches = None if batches is None else batches - 1
                done = self._finished(batch, failing)
                shards.commit_batch(self.folder, done)
                log.record(done, wall_s=wall_s)
            if not self.ledger.complete(shard):
                commits = shards.compact(self.folder, shard, self.plan.rows(shard), output=self.cfg.output)
                self.ledger.append(self.folder, 0, commits)
                shards.remove_batches(self.folder, shard)

    def _finished(self, plan: BatchPlan, failing: Sequence[str]) -> CompressedBatch:
        batch: Batch = self.plan.batch(plan)
        lost = RowFailure("denoise", "non_finite", f"latents of {HOSTILE} in float16")
        results = [
            RowResult(r.id, None, failure=lost)
            if r.id in failing
            else RowResult(r.id, picture(r.height, r.width, r.seed, self.cfg.output.image_format))
            for r in batch.requests
        ]
        times = StageTimes(encode_ms=1.0, denoise_ms=float(plan.bucket.num_inference_steps), decode_ms=2.0)
        return CompressedBatch(batch, tuple(results), times)

    def report(self) -> dict[str, Any]:
        return report.write_report(self.folder, job=job_of(self.cfg))


def picture(height: int, width: int, seed: int, image_format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (seed % 256, 99, 200)).save(buffer, image_format)
    return buffer.getvalue()


def job_of(cfg: JobConfig) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "created": "2026-01-31T00:00:00+00:00",
        "settings": asdict(cfg),
        "fingerprint": {},
        "versions": {"torch": "2.11.0", "absent": None},
    }


def config(tmp_path: Path, *, kind: str = "parquet", image_format: str = "png", shard_size: int = 6) -> JobConfig:
    cfg = JobConfig(
        model=ModelConfig(
            name="tiny",
            family="flux1",
            guidance="embedded",
            negative_prompts=True,
            license="apache-2.0",
            preset=ModelPreset(64, 64, 4, 3.5),
        ),
        sampler=SamplerConfig(64, 64, 4, 3.5),
        plan=PlanConfig(batch_size=4, shard_size=shard_size),
        pipeline=PipelineConfig(mode="serial"),
        output=OutputConfig(kind=kind, dir=str(tmp_path / "my run"), image_format=image_format),
    )
    cfg.manifest.path = str(tmp_path / "m.parquet")
    return cfg


def rows(number: int) -> list[dict[str, Any]]:
    """Three buckets; everything that is optional is null in the first rows."""
    sizes = [(64, 96), (64, 64), (96, 64)]
    return [
        {
            "id": f"row {n}/é.x",
            "prompt": f"prompt {n}",
            "negative_prompt": None,
            "height": sizes[n % 3][0],
            "width": sizes[n % 3][1],
            "seed": n,
            "category": None if n < number - 1 else "last",
            "tags": [] if n % 2 else [f"t{n}"],
        }
        for n in range(number)
    ]


def start(tmp_path: Path, manifest: list[dict[str, Any]] | pa.Table, cfg: JobConfig) -> Run:
    table = manifest if isinstance(manifest, pa.Table) else pa.Table.from_pylist(manifest)
    pq.write_table(table, cfg.manifest.path)
    folder = RunFolder(Path(str(cfg.output.dir)))
    plan, _ = prepare(folder, open_manifest(cfg.manifest), row_rules(cfg), cfg)
    return Run(folder, cfg, plan, Ledger.read(folder))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return start(tmp_path, rows(18), config(tmp_path))


# ---- status


def test_status_before_the_first_batch_knows_the_rows_and_no_rate(run: Run) -> None:
    found = report.status(run.folder)
    assert (found["rows"], found["written"], found["pending"], found["complete"]) == (18, 0, 18, False)
    assert found["images_per_s"] is None and found["eta_s"] is None and found["last_commit"] is None


def test_status_of_a_folder_that_is_still_planning(tmp_path: Path) -> None:
    found = report.status(RunFolder(tmp_path))
    assert (found["rows"], found["complete"], found["eta_s"]) == (0, False, None)


def test_status_while_running_counts_open_shards_and_tells_the_time_left(run: Run) -> None:
    run.do(batches=3, wall_s=100.0)  # shard 0: batches of 4 and 2 rows; then 4 rows of shard 1
    found = report.status(run.folder)
    assert (found["written"], found["pending"], found["in_open_shards"], found["complete"]) == (6, 12, 4, False)
    assert found["images_per_s"] == pytest.approx(10 / 300, abs=1e-3)
    # 64x96 and 96x64 cost 1.5 times 64x64: 10 rows of 1.5 in 300 s, and 2 rows of 1.5 and 6 rows of 1 to come.
    assert found["eta_s"] == round((2 * 1.5 + 6) / (10 * 1.5 / 300)) == 180


def test_a_row_with_a_negative_prompt_counts_twice_in_the_time_left(tmp_path: Path) -> None:
    manifest = [{"id": str(n), "prompt": "p", "negative_prompt": "q" if n < 4 else None, "seed": n} for n in range(8)]
    run = start(tmp_path, manifest, config(tmp_path))
    run.do(batches=1, wall_s=100.0)
    assert report.status(run.folder)["eta_s"] == 50


def test_status_of_a_finished_run(run: Run) -> None:
    run.do(failing=["row 4/é.x"])
    found = report.status(run.folder)
    assert (found["written"], found["failed"], found["pending"]) == (17, 1, 0)
    assert (found["complete"], found["eta_s"], found["in_open_shards"]) == (True, 0, 0)
    json.dumps(found, allow_nan=False)


NOW_S = datetime(2026, 1, 31, 8, tzinfo=UTC).timestamp()
FOUND = {
    "world_size": 1, "ranks_absent": [],
    "run": "night", "rows": 10, "written": 4, "failed": 0, "rejected": 1, "pending": 5, "in_open_shards": 2,
    "complete": False, "finished": False, "running": ["node pid 7 rank 0"], "not_running_since": None,
    "bucket": "64x64-4", "images_per_s": 3.414, "gpu_busy_share": 0.98, "gpu_power_w": 651.7, "eta_s": 7500,
    "last_commit": "2026-01-31T07:59:48.000+00:00", "last_success": None,
}  # fmt: skip


def test_status_tells_a_person_what_is_happening() -> None:
    assert report.status_words(FOUND, now_s=NOW_S).splitlines() == [
        "run: night", "rows: 10", "written: 4", "failed: 0", "rejected: 1",
        "pending: 5 (2 of them drawn and safe, in shards that are still open)",
        "state: 1 process running: node pid 7 rank 0", "bucket: 64x64-4", "rate: 3.41 images/s",
        "GPU: 98% in use, 652 W", "time left: about 2:05:00", "last batch: 2026-01-31 07:59:48 UTC, 12 s ago",
    ]  # fmt: skip


def test_status_of_a_run_that_stands_still_says_since_when_and_what_to_do() -> None:
    found = FOUND | {"running": [], "not_running_since": "2026-01-31T05:00:00.000+00:00"}
    words = report.status_words(found, now_s=NOW_S)
    assert "state: not running since 2026-01-31 05:00:00 UTC (3:00:00); the same run command goes on" in words
    assert "time left: about 2:05:00 once it runs again" in words and "GPU" not in words
    done = report.status_words(found | {"pending": 0, "complete": True, "finished": True}, now_s=NOW_S)
    assert "state: finished" in done and "time left" not in done
    two = report.status_words(FOUND | {"running": ["a", "b"]}, now_s=NOW_S)
    assert "2 processes running: a, b" in two


def test_status_of_a_folder_where_nothing_was_drawn_yet(tmp_path: Path) -> None:
    found = report.status(start(tmp_path, rows(3), config(tmp_path)).folder)
    words = report.status_words(found, now_s=NOW_S)
    assert "not running, nothing drawn yet" in words and "time left: unknown, nothing has been drawn yet" in words


def log_line(rank: int, batch: int, *, ago_s: float = 0.0, ok: int = 4, wall_s: float = 2.0) -> dict[str, Any]:
    time = datetime(2026, 1, 31, tzinfo=UTC) - timedelta(seconds=ago_s)
    return {
        "time": time.isoformat(timespec="milliseconds"), "rank": rank, "batch": batch, "bucket": "64x64-4",
        "rows_ok": ok, "rows_failed": 0, "rows_padded": 4 - ok, "wall_s": wall_s, "gpu_joules": 8.0, "denoise_ms": 9.0,
    }  # fmt: skip


def write_log(folder: RunFolder, rank: int, lines: list[dict[str, Any]], *, torn: str = "") -> None:
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.metrics(rank).write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def test_the_rate_of_ranks_that_work_side_by_side_is_summed_and_silent_ones_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_log(folder, 0, [log_line(0, n) for n in range(30)])
    write_log(folder, 1, [log_line(1, n) for n in range(30)])
    write_log(folder, 2, [log_line(2, 0, ago_s=7200)])
    assert throughput.images_per_s(throughput.working(throughput.recent_lines(folder))) == 4.0


# ---- report.json: numbers


def test_br49_the_total_is_images_by_wall_time_of_the_slowest_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_log(folder, 0, [log_line(0, 0), log_line(0, 1, ok=1, wall_s=3.0)], torn='{"time": "2026')
    write_log(folder, 1, [log_line(1, 2)])
    found = throughput.totals(throughput.read_log(folder))
    assert (found["images"], found["wall_s"], found["images_per_s"]) == (9, 5.0, 1.8)
    assert (found["batches"], found["rows_padded"], found["ranks"]) == (3, 3, 2)
    assert found["gpu_joules_per_image"] == pytest.approx(24 / 9, abs=1e-3)


def test_a_bucket_has_its_own_rate_and_the_median_of_its_stages(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = [{**log_line(0, n, wall_s=2.0), "denoise_ms": ms} for n, ms in enumerate([5.0, 7.0, 900.0])]
    write_log(folder, 0, [*lines, {**log_line(0, 3, ok=0), "bucket": "96x96-4", "denoise_ms": None}])
    found = throughput.by_bucket(throughput.read_log(folder))
    assert (found["64x64-4"]["images_per_s"], found["64x64-4"]["median_ms"]["denoise"]) == (2.0, 7.0)
    assert (found["96x96-4"]["images_per_s"], found["96x96-4"]["median_ms"]["denoise"]) == (0.0, None)


def test_a_stage_that_works_for_its_neighbours_has_a_mean_where_its_median_is_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_log(folder, 0, [{**log_line(0, n), "encode_ms": 0.0 if n % 8 else 320.0} for n in range(16)])
    found = throughput.by_bucket(throughput.read_log(folder))["64x64-4"]
    assert (found["median_ms"]["encode"], found["ms_per_image"]["encode"]) == (0.0, 10.0)
    assert found["gpu_joules_per_image"] == 2.0


def test_occupancy_is_a_share_of_the_wall_time_of_all_ranks_and_null_where_nothing_was_measured(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    line = {**log_line(0, 0, wall_s=2.0), "denoise_ms": 1500.0, "wait_prefetch_launch_ms": 20.0}
    write_log(folder, 0, [line, {**line, "batch": 1}])
    found = throughput.occupancy(throughput.read_log(folder))
    assert (found["busy"]["denoise"], found["busy"]["encode"]) == (0.75, None)
    assert (found["waiting"]["prefetch->launch"], found["waiting"]["compress->commit"]) == (0.01, None)
    empty = throughput.occupancy(throughput.SCHEMA.empty_table())
    assert set(empty["busy"].values()) == {None}


def test_the_run_over_time_leaves_pauses_out_and_sums_its_ranks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in (0, 1):
        write_log(folder, rank, [log_line(rank, 2 * n + rank, ago_s=7200 if n < 2 else 0) for n in range(4)])
    found = throughput.over_time(throughput.read_log(folder), count=2)
    assert [(point["worked_s"], point["images_per_s"]) for point in found] == [(4.0, 4.0), (8.0, 4.0)]
    assert found[0]["gpu_power_w"] is None
    assert throughput.over_time(throughput.SCHEMA.empty_table()) == []


def test_gpu_use_is_weighed_by_time_and_leaves_out_what_nvml_did_not_say(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    told = [(100.0, 3.0), (50.0, 1.0), (None, 9.0)]
    write_log(folder, 0, [{**log_line(0, 0, wall_s=s), "gpu_utilization_percent": use} for use, s in told])
    assert throughput.totals(throughput.read_log(folder))["gpu_busy_share"] == 0.875


def test_a_batch_that_the_logs_tell_twice_was_made_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_log(folder, 0, [log_line(0, n) for n in (0, 1, 1, 2)])
    assert throughput.made_again(throughput.read_log(folder)) == 4
    assert throughput.made_again(throughput.SCHEMA.empty_table()) == 0


def test_a_start_is_written_down_with_what_stood_there(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record_start(folder, 1, gpu="NVIDIA H200", rows_done=12, batches_to_make=3)
    [found] = throughput.starts(folder)
    assert (found["rank"], found["gpu"], found["rows_done"], found["batches_to_make"]) == (1, "NVIDIA H200", 12, 3)


@pytest.mark.parametrize("batches, images_per_s", [(0, None), (1, 2.0)])
def test_br49_the_total_is_defined_for_no_batch_and_for_one(
    tmp_path: Path, batches: int, images_per_s: float | None
) -> None:
    folder = RunFolder(tmp_path)
    write_log(folder, 0, [log_line(0, n) for n in range(batches)])
    assert throughput.totals(throughput.read_log(folder))["images_per_s"] == images_per_s


def test_report_json_tells_what_became_of_the_rows(tmp_path: Path) -> None:
    manifest = rows(18) + [{**rows(1)[0], "id": f"bad {n}", "height": 65} for n in range(3)]
    run = start(tmp_path, manifest, config(tmp_path))
    run.do(failing=["row 4/é.x", "row 5/é.x"])
    found = run.report()
    assert json.loads(run.folder.report_json.read_text()) == found
    assert [found[k] for k in ("rows", "written", "failed", "rejected", "pending")] == [21, 16, 2, 3, 0]
    assert found["failed_by_reason"] == {"denoise: non_finite": 2}
    assert sum(found["rejected_by_reason"].values()) == 3 and len(found["rejected_by_reason"]) == 1
    assert [row["id"] for row in found["listed"]["denoise: non_finite"]] == ["row 5/é.x", "row 4/é.x"]
    [listed] = [found["listed"][reason] for reason in found["rejected_by_reason"]]
    assert [(row["id"], row["row"]) for row in listed] == [(f"bad {n}", 18 + n) for n in range(3)]
    assert set(found["examples"]) == set(found["failed_by_reason"]) | set(found["rejected_by_reason"])
    assert {b["bucket"]: (b["rows"], b["images"]) for b in found["buckets"]} == {
        "96x64-4": (6, 5), "64x96-4": (6, 6), "64x64-4": (6, 5),
    }  # fmt: skip
    assert found["buckets"][0]["median_ms"]["denoise"] == 4.0
    assert found["settings"]["model"]["name"] == "tiny" and found["versions"]["torch"] == "2.11.0"
    assert found["totals"]["images"] == 16 and found["totals"]["first_time"] <= found["totals"]["last_time"]


def test_a_retry_takes_rows_out_of_the_failures_and_adds_none(run: Run) -> None:
    run.do(failing=["row 4/é.x", "row 5/é.x"])
    run.plan = add_retry(run.folder, run.plan, {0: {"row 5/é.x"}, 2: {"row 4/é.x"}})
    run.do(failing=["row 4/é.x"])
    found = run.report()
    assert (found["rows"], found["written"], found["failed"]) == (18, 17, 1)
    assert found["failed_by_reason"] == {"denoise: non_finite": 1}
    assert sum(bucket["rows"] for bucket in found["buckets"]) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_on_the_disk(tmp_path: Path, kind: str) -> None:
    run = start(tmp_path, rows(18), config(tmp_path, kind=kind))
    run.do(failing=["row 4/é.x"])
    files = [path for top in (run.folder.data, run.folder.failures) for path in top.rglob("*") if path.is_file()]
    assert run.report()["bytes"] == sum(path.stat().st_size for path in files)


def test_a_report_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FluxbatchError, match=re.escape(str(tmp_path))):
        report.write_report(RunFolder(tmp_path), job={})


# ---- report.html


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    tmp_path = tmp_path_factory.mktemp("hostile")
    manifest = [{**row, "prompt": HOSTILE} for row in rows(12)]
    run = start(tmp_path, manifest, config(tmp_path))
    run.do(failing=["row 4/é.x"])
    run.report()
    return run


def test_hostile_prompts_are_nothing_but_text(hostile: Run) -> None:
    text = hostile.folder.report_html.read_text()
    page = Page(text)
    assert not page.all("script")
    assert all(set(image) == {"src", "alt", "width", "height"} for image in page.all("img"))
    assert {image["alt"] for image in page.all("img")} == {one_line(HOSTILE)}
    assert "{{ 7 * 7 }}" in text and "&lt;script&gt;" in text


def test_the_page_is_one_file_with_its_pictures_inside_and_asks_for_nothing(hostile: Run) -> None:
    page = Page(hostile.folder.report_html.read_text())
    images = page.all("img")
    assert len(images) == 11 and all(str(image["src"]).startswith("data:image/") for image in images)
    addresses = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("href", "src")]
    assert all(str(address).startswith("data:") for address in addresses)
    assert "url(" not in hostile.folder.report_html.read_text()


def test_the_page_follows_the_light_and_fits_a_phone(hostile: Run) -> None:
    text = hostile.folder.report_html.read_text()
    assert "prefers-color-scheme: dark" in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in Page(text).all("meta")


# ---- contact sheet


@pytest.mark.parametrize(
    "kind, image_format",
    [("parquet", "png"), ("webdataset", "jpeg"), ("webdataset", "webp"), ("folder", "png")],
)
def test_samples_are_spread_over_every_bucket(tmp_path: Path, kind: str, image_format: str) -> None:
    run = start(tmp_path, rows(60), config(tmp_path, kind=kind, image_format=image_format))
    run.do(failing=["row 0/é.x"])
    found = take_samples(run.folder, run.plan, run.ledger, image_format=image_format, limit=6)
    assert [sample.bucket for sample in found] == ["96x64-4"] * 2 + ["64x96-4"] * 2 + ["64x64-4"] * 2
    assert [sample.id for sample in found] == [f"row {n}/é.x" for n in (17, 47, 15, 45, 16, 46)]  # 1/4 and 3/4 of each
    for sample in found:
        assert sample.prompt == f"prompt {sample.id.split('/')[0].removeprefix('row ')}"
        assert max(sample.image.size) == 192
        assert abs(sample.image.getpixel((50, 50))[0] - int(sample.prompt.split()[1])) <= 8  # its own image


def test_a_failed_row_gives_its_place_to_the_nearest_written_one(tmp_path: Path) -> None:
    run = start(tmp_path, [{**row, "height": 64, "width": 64} for row in rows(5)], config(tmp_path))
    run.do(failing=["row 2/é.x", "row 3/é.x"])
    found = take_samples(run.folder, run.plan, run.ledger, image_format="png", limit=1)
    assert [sample.id for sample in found] == ["row 1/é.x"]


def test_only_committed_shards_are_sampled(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.do(batches=3)
    found = take_samples(run.folder, run.plan, run.ledger, image_format="png")
    assert {sample.bucket for sample in found} == {"96x64-4"} and len(found) == 6
    assert not caplog.records  # and nothing else was tried


def test_a_lost_or_damaged_shard_costs_its_pictures_not_the_report(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.do()
    run.folder.shard(0, "parquet").unlink()
    run.folder.shard(1, "parquet").write_bytes(b"PAR1 no longer PAR1")
    assert run.report()["written"] == 18
    assert "shard 0" in caplog.text and "shard 1" in caplog.text
    assert len(Page(run.folder.report_html.read_text()).all("img")) == 6


def test_only_the_wanted_images_are_read_from_a_folder(tmp_path: Path) -> None:
    run = start(tmp_path, rows(6), config(tmp_path, kind="folder"))
    run.do()
    shard = run.folder.shard(0, "folder")
    wanted, *others = sorted(shard.glob("*.png"))
    for other in others:
        other.unlink()
    lines = map(json.loads, (shard / "metadata.jsonl").read_text().splitlines())
    [row_id] = [line["id"] for line in lines if line["file_name"] == wanted.name]
    assert [found for found, _ in read_images(shard / "metadata.jsonl", [row_id], image_format="png")] == [row_id]


def test_shares_are_fair_and_small_buckets_leave_room() -> None:
    assert fair_shares({"a": 100, "b": 1, "c": 100}, 9) == {"a": 4, "b": 1, "c": 4}
    assert fair_shares({"a": 2, "b": 3}, 48) == {"a": 2, "b": 3}
    assert sum(fair_shares({str(n): 5 for n in range(100)}, 48).values()) == 48
    assert fair_shares({}, 48) == {}


def test_the_sheet_is_a_png_with_a_cell_for_each_sample(run: Run) -> None:
    run.do()
    run.report()
    with Image.open(run.folder.contact_sheet) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width == 16 + 8 * 208 and sheet.height == 16 + 3 * (208 + 3 * 17)


def test_an_empty_sheet_is_still_a_picture() -> None:
    assert draw_sheet([]).size == (16 + 208, 16 + 208 + 3 * 17)


@pytest.mark.parametrize("text", ["a red circle on a white background " * 20, "x" * 400, "one\ntwo\tthree", "", " "])
def test_captions_fit_their_cell(text: str) -> None:
    font = ImageFont.load_default(13)
    lines = wrap(text, font=font, width_px=192, max_lines=2)
    assert len(lines) <= 2 and all(font.getlength(line) <= 192 for line in lines)
    flat = " ".join(text.split())
    assert " ".join(lines) == flat if len(flat) < 30 else lines[-1].endswith("…")
    assert all("\n" not in line for line in lines)


# ---- dataset card


def front_matter(folder: RunFolder) -> dict[str, Any]:
    return yaml.safe_load(folder.card.read_text().split("---\n")[1])


def load(run: Run, tmp_path: Path) -> datasets.Dataset:
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(str(run.folder.root), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"]
    return loaded["train"]


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of any output: the settings and the image under the same names."""
    image = next(row[name] for name in ("image", "png", "jpg", "webp") if name in row)
    return {**row, **row.get("json", {}), "image": image}


def litter(folder: RunFolder) -> None:
    """What else may stand in a run folder."""
    folder.job.write_text("{}")
    folder.success.touch()
    folder.locks.mkdir()
    folder.lease(0).write_text("{}")
    (folder.data / ".tmp-shard-00099.parquet-abc").write_bytes(b"torn")


@pytest.mark.parametrize(
    "kind, image_format",
    [("parquet", "png"), ("webdataset", "jpeg"), ("webdataset", "webp"), ("folder", "png")],
)
def test_load_dataset_opens_the_folder_with_nothing_else(tmp_path: Path, kind: str, image_format: str) -> None:
    manifest = [*rows(18), {**rows(1)[0], "id": "bad", "height": 65}]
    run = start(tmp_path, manifest, config(tmp_path, kind=kind, image_format=image_format))
    run.do(failing=["row 4/é.x"])
    run.report()
    litter(run.folder)
    found = {row["id"]: row for row in map(flat, load(run, tmp_path))}
    assert set(found) == {f"row {n}/é.x" for n in range(18) if n != 4}
    for n, row in ((int(name.split("/")[0][4:]), row) for name, row in found.items()):
        assert isinstance(row["image"], Image.Image) and row["image"].size == (row["width"], row["height"])
        assert (row["seed"], row["prompt"], row["negative_prompt"]) == (n, f"prompt {n}", None)
        assert (row["category"], row["tags"]) == ("last" if n == 17 else None, [] if n % 2 else [f"t{n}"])
        assert (row["num_inference_steps"], row["guidance_scale"], row["truncated"]) == (4, 3.5, False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_seeds_and_extra_columns_of_every_type_come_back(tmp_path: Path, kind: str) -> None:
    box = pa.struct([("x", pa.int8()), ("labels", pa.list_(pa.list_(pa.string())))])
    extras = pa.table(
        {
            "when": pa.array([None, date(2026, 1, 31)], pa.date32()),
            "blob": pa.array([None, b"\x00\xff"], pa.binary()),
            "box": pa.array([None, {"x": 1, "labels": [["a"], []]}], box),
            "score": pa.array([None, 0.5], pa.float32()),
            "kind": pa.array([None, "b"]).dictionary_encode(),
            "flags": pa.array([None, [True, False]], pa.list_(pa.bool_(), 2)),
            "nothing": pa.nulls(2),
        }
    )
    seeds = pa.array([2**64 - 1, 2**63], pa.uint64())
    table = pa.table(
        {"id": ["a", "b"], "prompt": ["p", "q"], "seed": seeds, **{name: extras[name] for name in extras.column_names}}
    )
    run = start(tmp_path, table, config(tmp_path, kind=kind))
    run.do()
    run.report()
    first, second = sorted(map(flat, load(run, tmp_path)), key=lambda row: row["id"])
    assert [str(row["seed"]) for row in (first, second)] == [str(seed) for seed in seeds]
    assert all(not first[name] for name in extras.column_names if name != "box")
    assert (second["box"]["x"], second["box"]["labels"], second["score"]) == (1, [["a"], []], 0.5)
    assert (second["kind"], second["flags"], second["nothing"]) == ("b", [True, False], None)
    assert str(second["when"]).startswith("2026-01-31")


def test_json_features_are_what_the_yaml_of_datasets_says() -> None:
    assert json_feature(pa.list_(pa.struct([("a", pa.uint64())]))) == {
        "list": {"struct": [{"name": "a", "dtype": "string"}]}
    }
    assert json_feature(pa.decimal128(20, 0)) == json_feature(pa.timestamp("us")) == {"dtype": "string"}
    assert json_feature(pa.duration("s")) == {"dtype": "float64"}


def test_no_written_row_gives_a_card_that_names_no_other_file_as_data(run: Run) -> None:
    run.do(failing=[f"row {n}/é.x" for n in range(18)])
    run.report()
    [data_files] = front_matter(run.folder)["configs"][0]["data_files"]
    assert data_files["path"].startswith("data/"), "else `datasets` would take the plan for the data"
    assert "nothing to load" in run.folder.card.read_text()
    assert not Page(run.folder.report_html.read_text()).all("img")


def test_an_empty_manifest_is_reported_too(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    run = start(tmp_path, table, config(tmp_path))
    found = run.report()
    assert (found["rows"], found["complete"], found["totals"]["images_per_s"]) == (0, True, None)
    assert front_matter(run.folder)["configs"][0]["data_files"][0]["path"].startswith("data/")


def test_the_card_says_licence_size_and_failures_and_no_markup_gets_through(hostile: Run) -> None:
    data, text = front_matter(hostile.folder), hostile.folder.card.read_text()
    assert (data["license"], data["size_categories"]) == ("apache-2.0", ["n<1K"])
    assert data["task_categories"] == ["text-to-image"] and "synthetic" in data["tags"]
    [line] = [line for line in text.splitlines() if line.startswith("| denoise: non\\_finite")]
    assert "<script>" not in text and len(re.findall(r"(?<!\\)\|", line)) == 4


@pytest.mark.parametrize(
    "path, base",
    [("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-dev"), ("/models/a/b", None), (None, None)],
)
def test_the_card_names_model_revision_licence_and_sampler(run: Run, path: str | None, base: str | None) -> None:
    run.cfg.model.path, run.cfg.model.revision, run.cfg.model.license = path, "3de623f", "other"
    run.do()
    run.report()
    data, text = front_matter(run.folder), run.folder.card.read_text()
    assert data.get("base_model") == base
    assert (data["license"], data["license_name"]) == ("other", "tiny-license")
    assert "revision 3de623f" in text and "Euler steps of the flow ODE, guidance embedded" in text


@pytest.mark.parametrize(
    "number, words",
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (10**9 - 1, "100M<n<1B"), (10**12, "n>1B")],
)
def test_size_categories_are_the_hubs(number: int, words: str) -> None:
    assert size_category(number) == words


def test_the_same_run_gives_the_same_card(run: Run) -> None:
    run.do()
    found = run.report()
    first = run.folder.card.read_bytes()
    assert dataset_card(found, schema=pa.schema([])) == first
    run.report()
    assert run.folder.card.read_bytes() == first


# ---- the demo manifest

MANIFESTS = Path(__file__).parent.parent / "manifests"


def test_the_demo_manifest_is_what_its_script_writes(tmp_path: Path) -> None:
    made = tmp_path / "demo.parquet"
    subprocess.run([sys.executable, MANIFESTS / "make_demo.py", made], check=True, capture_output=True)
    ours, stored = pq.ParquetFile(made), pq.ParquetFile(MANIFESTS / "demo.parquet")
    assert ours.read().equals(stored.read(), check_metadata=True)
    if ours.metadata.created_by == stored.metadata.created_by:
        assert made.read_bytes() == (MANIFESTS / "demo.parquet").read_bytes()


def test_the_demo_manifest_shows_what_a_manifest_may_say(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.manifest.path = str(MANIFESTS / "demo.parquet")
    cfg = replace(cfg, output=replace(cfg.output, dir=str(tmp_path / "demo")))
    plan, changes = prepare(
        RunFolder(tmp_path / "demo"), open_manifest(cfg.manifest), replace(row_rules(cfg), max_pixels=262_144), cfg
    )
    table = pq.read_table(cfg.manifest.path)
    assert plan.num_rows == table.num_rows == 48 and changes.rejected == 0
    assert len(set(zip(table["height"].to_pylist(), table["width"].to_pylist(), strict=True))) >= 5
    assert 0 < table["seed"].null_count < 48 and len(set(table["num_inference_steps"].to_pylist())) == 3
    assert len(set(table["guidance_scale"].to_pylist())) == 3 and table["negative_prompt"].null_count == 46
    ids = "".join(table["id"].to_pylist())
    assert all(sign in ids for sign in " ./'\"#💜円") and "category" in table.column_names
