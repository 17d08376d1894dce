"""What a run would cost, before it is paid for: the grounds that an estimate rests on, and what it says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_model import FakeModel
from test_run import do

from fluxbatch import forecast, verbs
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.output import shards
from fluxbatch.plan import estimate, rates
from fluxbatch.plan.estimate import Work
from fluxbatch.records import Bucket
from fluxbatch.telemetry import throughput

ROOT = Path(__file__).parent.parent
SQUARE, SMALL = Bucket(1024, 1024, 28), Bucket(512, 512, 28)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLUXBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rates"


def composed(*overrides: str) -> JobConfig:
    kept: list[JobConfig] = []
    with_config(["manifest.path=m.parquet", *overrides], lambda cfg: kept.append(cfg) or 0)  # type: ignore[func-returns-value]
    return kept[0]


def observed(**changes: Any) -> rates.Observed:
    base = rates.Observed(
        run="/runs/a", time="2026-01-31T00:00:00+00:00", launched=1000, seconds=4000.0, low_s=3.9, high_s=4.2,
        warm_up_s=60.0, peak_gib=44.0, codec="png-1", bytes_per_pixel=1.2,
    )  # fmt: skip
    return replace(base, **changes)


def hours(cfg: JobConfig, *work: Work) -> estimate.Hours:
    found = estimate.gpu_hours(work, cfg, rates.recall(cfg))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "settings, bucket, seconds",
    [
        (["model=flux1_dev"], SQUARE, 3.47),
        (["model=flux1_dev", "model.quantization=fp8"], SQUARE, 2.34),
        (["model=flux2_klein_4b"], Bucket(1024, 1024, 4), 0.250),
        (["model=flux2_klein_4b"], Bucket(512, 512, 4), 0.075),
        (["model=flux2_klein_4b", "model.quantization=fp8"], Bucket(1024, 1024, 4), 0.174),
        (["model=flux2_klein_4b", "model.quantization=fp8"], Bucket(512, 512, 4), 0.050),
    ],
)
def test_the_flop_model_tells_what_was_measured_within_its_range_and_says_what_it_is(
    settings: list[str], bucket: Bucket, seconds: float
) -> None:
    found = hours(composed(*settings), Work(bucket, 1000, 1000))
    assert found.gpu.likely * 3.6 == pytest.approx(seconds, rel=0.05)
    assert found.gpu.low < found.gpu.likely < found.gpu.high
    [ground] = found.rests_on
    assert ground.startswith("a FLOP model at") and "one H200" in ground


def test_a_second_pass_doubles_the_denoise_and_padding_costs_what_images_do() -> None:
    cfg = composed("model=flux1_dev")
    once, twice = (hours(cfg, Work(replace(SQUARE, negative_pass=cfg_pass), 8, 8)) for cfg_pass in (False, True))
    assert twice.gpu.likely == pytest.approx(2 * once.gpu.likely, rel=0.01)
    assert hours(cfg, Work(SQUARE, 5, 8)).gpu == once.gpu


def test_measured_rates_come_first_then_those_of_other_shapes_by_flops() -> None:
    cfg = composed("model=flux1_dev")
    rates.remember(cfg, device="NVIDIA H200", observed={SQUARE: observed()})
    rates.remember(cfg, device="NVIDIA H200", observed={SQUARE: observed(run="/runs/b", seconds=5000.0, high_s=5.5)})
    found = hours(cfg, Work(SQUARE, 3600, 3600), Work(SMALL, 3600, 3600))
    same, other = found.rests_on
    assert same == "measured on NVIDIA H200 in 2 runs"
    assert other == "measured on NVIDIA H200 for other shapes, scaled by FLOPs"
    alone = hours(cfg, Work(SQUARE, 3600, 3600)).gpu
    assert (alone.low, alone.likely, alone.high) == (3.9, 4.5, 5.5)
    assert sum(found.rests_on.values()) == pytest.approx(1) and found.rests_on[same] > 0.7


def test_a_resume_replaces_what_its_run_said_and_eight_runs_are_kept(cache: Path) -> None:
    cfg = composed("model=flux1_dev")
    for n in range(10):
        rates.remember(cfg, device="a", observed={SQUARE: observed(run=f"/runs/{n}")})
        rates.remember(cfg, device="a", observed={SQUARE: observed(run=f"/runs/{n}", launched=5)})
    [known] = rates.recall(cfg)
    assert [(run.run, run.launched) for run in known.runs] == [(f"/runs/{n}", 5) for n in range(2, 10)]
    assert len(list(cache.iterdir())) == 1


def test_rates_of_other_settings_and_of_another_device_do_not_count() -> None:
    cfg = composed("model=flux1_dev")
    rates.remember(cfg, device="an old GPU", observed={SMALL: observed()})
    rates.remember(cfg, device="NVIDIA H200", observed={SQUARE: observed()})
    assert [(known.device, known.bucket) for known in rates.recall(cfg)] == [("NVIDIA H200", SQUARE)]
    assert rates.recall(composed("model=flux1_dev", "model.quantization=fp8")) == []
    assert rates.recall(composed("model=flux1_schnell")) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"runs": [{}], "settings": {}}', b"\xff"])
def test_an_unreadable_cache_is_said_and_costs_the_estimate_its_ground_only(
    cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = composed("model=flux1_dev")
    rates.remember(cfg, device="a", observed={SQUARE: observed()})
    next(cache.iterdir()).write_bytes(content)
    assert rates.recall(cfg) == []
    rates.remember(cfg, device="a", observed={SQUARE: observed()})
    assert len(rates.recall(cfg)) == 1


def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLUXBATCH_CACHE", str(tmp_path / "file"))
    cfg = composed("model=flux1_dev")
    rates.remember(cfg, device="a", observed={SQUARE: observed(), SMALL: observed()})
    assert caplog.text.count("cannot be kept") == 1 and rates.recall(cfg) == []


def test_bytes_follow_earlier_runs_of_the_same_codec_only() -> None:
    cfg, work = composed("model=flux1_dev"), [Work(SQUARE, 10, 16)]
    rates.remember(cfg, device="a", observed={SMALL: observed(bytes_per_pixel=0.5)})
    known = rates.recall(cfg)
    size, ground = estimate.image_bytes(work, cfg, known, codec="png-1")
    assert (size.likely, ground) == (10 * 1024**2 * 0.5, "measured in 1 run")
    size, ground = estimate.image_bytes(work, cfg, known, codec="png-9")
    assert (size.likely, ground) == (10 * 1024**2 * 1.5, "a rule of thumb for png")


@pytest.mark.parametrize(
    "settings, weights_gib, windowed, fits",
    [
        (["model=flux1_dev"], 31.4, False, None),
        (["model=flux1_dev", "model.memory_budget_gib=40"], 31.4, False, True),
        (["model=flux1_dev", "model.memory_budget_gib=30"], 23.5, True, True),
        (["model=flux1_dev", "model.memory_budget_gib=22"], 23.5, True, False),
        (["model=flux1_dev", "model.memory_budget_gib=22", "model.quantization=fp8"], 15.5, True, True),
        (["model=flux2_klein_9b", "model.residency=windowed"], 18.9, True, None),
        (["model=flux2_klein_4b", "model.dtype=float32"], 26.4, False, None),
    ],
)
def test_memory_is_weights_and_room_to_work_in(
    settings: list[str], weights_gib: float, windowed: bool, fits: bool | None
) -> None:
    found = estimate.memory(composed(*settings), [], largest=SQUARE)
    assert found is not None and found.weights_gib == pytest.approx(weights_gib, abs=0.1)
    assert (found.windowed, found.fits) == (windowed, fits)


def test_a_peak_that_was_measured_for_the_largest_images_is_believed() -> None:
    cfg = composed("model=flux1_dev")
    rates.remember(cfg, device="NVIDIA H200", observed={SQUARE: observed(peak_gib=44.5)})
    found = [estimate.memory(cfg, rates.recall(cfg), largest=largest) for largest in (SQUARE, Bucket(2048, 2048, 28))]
    assert [of and of.peak_gib for of in found] == [44.5, pytest.approx(37.5, abs=0.1)]


def log_table(seconds: list[float], *, first: int = 1) -> pa.Table:
    rows = [
        {"batch": n, "bucket": "64x64-4", "wall_s": s, "rows_ok": 3, "rows_failed": 0, "rows_padded": 1,
         "first_of_shape": n < first}
        for n, s in enumerate(seconds)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, throughput.SCHEMA)


def test_first_launches_are_no_rate_and_two_batches_are_too_few() -> None:
    [found] = throughput.launches(log_table([90.0, 4.0, 4.0, 8.0]))
    assert (found["launched"], found["seconds"], found["warm_up_s"]) == (12, 16.0, 90.0)
    assert found["low_s"] == 1.0 and 1.0 < found["high_s"] <= 2.0
    assert throughput.launches(log_table([90.0, 4.0, 4.0])) == []


# ---- the verb


def command(*arguments: str, script: str = "-m fluxbatch", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *script.split(), *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def many_shapes(path: Path) -> str:
    rows = [{"id": str(n), "prompt": "p", "height": 16 * (1 + n % 25), "width": 64} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return f"manifest.path={path}"


def test_plan_sums_up_more_than_twenty_buckets_and_tells_the_cost_in_no_currency(tmp_path: Path) -> None:
    settings = [many_shapes(tmp_path / "m.parquet"), "model=flux1_dev", f"output.dir={tmp_path}/run"]
    words = command("plan", *settings, "run.gpu_hour_price=2.5").stdout
    assert "buckets: 25\n" in words and "  and 5 smaller ones: 10 rows in 5 batches (--json has them all)\n" in words
    assert " at 2.5 a GPU hour" in words and "peak memory: about 37.4 GiB" in words
    five = ["run.rank=0", "run.world_size=5"]  # 25 shards of about equal cost
    answer = json.loads(command("plan", "--json", *settings, *five, "plan.shard_size=2").stdout)
    assert len(answer["buckets"]) == 25 and answer["cost"] is None
    assert answer["wall_hours"]["likely"] == pytest.approx(answer["gpu_hours"]["likely"] / 5, rel=0.02)
    words = command("plan", *settings, *five).stdout
    assert "with 5 ranks on 1 shard, which is never divided (plan.shard_size)" in words


@pytest.mark.slow
def test_plan_of_a_run_that_was_stopped_tells_what_is_left_and_rests_on_what_it_measured(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": "p", "height": 64, "width": 64, "seed": n} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    settings = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/run", "plan.batch_size=2"]
    settings += ["plan.shard_size=20"]
    stopped = command(*settings, script="tests/run_fake.py", KILL_AT="publish:19")
    assert stopped.returncode < 0, stopped.stderr
    done = len(throughput.read_log(forecast.RunFolder(tmp_path / "run")))
    words, answer = command("plan", *settings).stdout, json.loads(command("plan", "--json", *settings).stdout)
    safe = answer["run"]["written"] + answer["run"]["in_open_shards"]
    assert safe - 2 * done in (0, 2), "the kill may fall between a batch and its line in the log"
    assert answer["to_draw"] == 40 - safe > 0 and answer["run"]["manifest_unchanged"]
    assert f"left to draw: {answer['to_draw']} rows" in words and "measured on a CPU in 1 run" in words
    assert command(*settings, script="tests/run_fake.py").returncode == 0
    assert "left to draw: nothing" in command("plan", *settings).stdout


def planned(*settings: str) -> tuple[int, dict[str, Any], str]:
    """The exit code of `plan`, its answer for scripts and its words."""
    answers = []
    with_config(list(settings), lambda cfg: answers.append(verbs.plan(cfg)) or 0)  # type: ignore[func-returns-value]
    [(answer, words, code)] = answers
    assert code == answer["exit_code"]
    return code, answer, words


def test_plan_tells_what_a_run_would_find_changed_and_ends_as_the_run_does(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": "p", "height": 64, "width": 64, "seed": n} for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows[:9]), tmp_path / "m.parquet")
    settings = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/run", "plan.batch_size=1"]
    do([*settings, "plan.shard_size=4"])
    pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "m.parquet")
    code, answer, words = planned(*settings)
    assert (code, answer["to_draw"], answer["run"]["manifest_unchanged"]) == (0, 3, False)
    assert "since it was planned: 3 rows added, 0 edited, 2 deleted (which are kept)\nleft to draw: 3 rows" in words
    edited = [row | {"prompt": "other"} if row["id"] in ("r3", "r8") else row for row in rows[2:]]
    pq.write_table(pa.Table.from_pylist(edited), tmp_path / "m.parquet")
    code, answer, words = planned(*settings)
    assert [answer["run"][f"rows_{kind}"] for kind in ("added", "edited", "deleted")] == [3, 2, 2]
    assert (code, answer["to_draw"]) == (3, 3)
    assert "a run would end with 3: 2 planned rows were edited since (id 'r3', 'r8' (prompt)); give them" in words
    before = sorted((tmp_path / "run").rglob("*"))
    code, answer, words = planned(*settings, "run.on_change=redo")
    assert (code, answer["to_draw"]) == (0, 5) and "edited rows are made again\nleft to draw: 5 rows" in words
    code, answer, words = planned(*settings, "run.on_change=redo", "output.image_format=webp")
    assert (code, answer["to_draw"]) == (0, 12)
    assert "all rows are made again: output.image_format was 'png', is 'webp'" in words
    with pytest.raises(ConfigError, match=r"output\.image_format must be 'png', got 'webp'"):
        planned(*settings, "output.image_format=webp")
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_plan_counts_an_edited_row_once_that_an_open_shard_still_lacks(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": "p", "height": 64, "width": 64} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    settings = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/run", "plan.batch_size=1"]
    do([*settings, "plan.shard_size=4", "run.rank=0", "run.world_size=2"])  # the other shard is pending
    pq.write_table(pa.Table.from_pylist([row | {"prompt": "other"} for row in rows]), tmp_path / "m.parquet")
    assert planned(*settings, "run.on_change=redo")[1]["to_draw"] == 8


def test_plan_ends_with_4_where_rows_have_failed_and_with_3_where_a_run_cannot_add_a_row(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": "p", "height": 64, "width": 64, "seed": n, "tag": "t"} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    settings = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/run"]
    do(settings, lambda: FakeModel(nan_pixels=[2]))
    assert planned(*settings)[0] == do(settings)[1] == 4
    code, answer, _ = planned(*settings, "run.retry_failed=true")
    assert (code, answer["to_draw"]) == (0, 1) and planned(*settings)[1]["to_draw"] == 0
    changed = [row | {"prompt": "other"} if row["id"] == "r2" else row for row in rows]
    pq.write_table(pa.Table.from_pylist(changed), tmp_path / "m.parquet")
    redone = planned(*settings, "run.retry_failed=true", "run.on_change=redo")[1]
    assert redone["to_draw"] == 1, "an edited row is drawn again as it is now, and not as it failed besides"
    pq.write_table(pa.Table.from_pylist([rows[0] | {"id": "new", "price": 1.0}, *rows]), tmp_path / "m.parquet")
    code, _, words = planned(*settings)
    assert code == 3 and "a run would end with 3: column price is not in the plan that this run began with" in words
    with pytest.raises(ManifestError, match="column price is not in the plan"):
        do(settings)


def test_a_default_that_has_changed_since_is_told_by_plan_as_a_run_refuses_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "prompt": ["p"]}), tmp_path / "m.parquet")
    settings = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/run", "sampler.height=64"]
    do([*settings, "sampler.num_inference_steps=4"])
    code, _, words = planned(*settings, "sampler.num_inference_steps=8")
    assert code == 2
    assert "a run would end with 2: sampler.num_inference_steps was 4, is 8: that changes 1 planned rows" in words


def test_a_manifest_without_an_accepted_row_has_no_shard_to_divide(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "prompt": ["p"], "height": [7]}), tmp_path / "m.parquet")
    done = command("plan", f"manifest.path={tmp_path}/m.parquet")
    assert done.returncode == 4 and "never divided" not in done.stdout


def test_the_size_of_a_shard_that_is_still_being_made_when_all_is_drawn_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return compact(*args, **kwargs)

    compact = shards.compact
    monkeypatch.setattr(shards, "compact", slowly)
    rows = [{"id": f"r{n}", "prompt": "p", "height": 64, "width": 64, "seed": n} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    do([f"manifest.path={tmp_path}/m.parquet", "plan.batch_size=2", f"output.dir={tmp_path}/a"])
    answer = json.loads(
        command("plan", "--json", f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/b").stdout
    )
    written = sum(path.stat().st_size for path in (tmp_path / "a" / "data").iterdir())
    assert answer["image_bytes"] == pytest.approx(written, rel=0.01)


def test_a_price_below_nothing_is_refused(tmp_path: Path) -> None:
    refused = command("plan", "job=demo", "run.gpu_hour_price=-1")
    assert refused.returncode == 2 and "run.gpu_hour_price must be null or a finite number >= 0" in refused.stderr
    assert asdict(composed())["run"]["gpu_hour_price"] is None
