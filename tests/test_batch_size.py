"""Batch sizes by measurement: the knee of a scripted curve, what is remembered, what a plan records, a real meter."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_model import FakeModel

from fluxbatch import config_rules, run, verbs
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig, ModelConfig, PipelineConfig, PlanConfig
from fluxbatch.errors import Interrupted
from fluxbatch.pipeline import measure
from fluxbatch.plan import batch_size
from fluxbatch.plan.batch_size import Machine, MeasuredSizes, RememberedSizes
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import Bucket, LaunchCost
from fluxbatch.storage.folder import RunFolder

SQUARE = Bucket(512, 512, 4)  # the rule launches 16
H200 = Machine(gpu="NVIDIA H200", memory_gib=139.8, budget_gib=125.0)
MANY = 10_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLUXBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batch_sizes"


class ScriptedGpu:
    """Images a second by batch size, for four steps; a size that is not in the script does not fit."""

    def __init__(self, rates: dict[int, float], *, gib_per_image: float = 1.0) -> None:
        self.rates, self.gib_per_image = rates, gib_per_image
        self.asked: list[tuple[str, int]] = []

    def __call__(self, bucket: Bucket, size: int) -> LaunchCost | None:
        self.asked.append((bucket.name, size))
        if size not in self.rates:
            return None
        return LaunchCost(size, step_s=size / self.rates[size] / 4, decode_s=0.0, peak_gib=size * self.gib_per_image)

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.asked]


def settings(**plan: object) -> JobConfig:
    model = ModelConfig(name="flux2_klein_4b", family="flux2", guidance="none", negative_prompts=False)
    return JobConfig(model=model, plan=PlanConfig(**plan))


def choose(gpu: ScriptedGpu, *, bucket: Bucket = SQUARE, rows: int = MANY, machine: Machine = H200, **plan) -> int:
    return MeasuredSizes(settings(**plan), machine, gpu)(bucket, rows)


@pytest.mark.parametrize(
    ("rates", "size", "asked"),
    [
        ({1: 10.0, 2: 10.01, 4: 10.05, 8: 10.05}, 1, [1, 2, 4]),  # flat: two doublings without a gain are enough
        ({1: 10.0, 2: 15.0, 4: 20.0, 8: 20.1, 16: 20.2, 32: 99.0}, 4, [1, 2, 4, 8, 16]),
        ({1: 10.0, 2: 10.1, 4: 12.0, 8: 12.05, 16: 12.06}, 4, [1, 2, 4, 8, 16]),  # one unlucky doubling ends nothing
        ({1: 10.0, 2: 12.0, 4: 9.0}, 2, [1, 2, 4]),
        ({1: 10.0, 2: 15.0, 4: 20.0}, 4, [1, 2, 4, 8]),  # 8 do not fit
        ({}, 1, [1]),
    ],
)
def test_auto_takes_the_smallest_size_that_is_about_as_fast_as_the_best(rates, size, asked):
    gpu = ScriptedGpu(rates)
    assert choose(gpu) == size
    assert gpu.sizes == asked


def test_the_chosen_size_never_exceeds_rows_or_shard_and_spares_padding():
    rising = {2**n: float(2**n) for n in range(12)}
    assert choose(ScriptedGpu(rising)) == batch_size.MAX_IMAGES
    large = Bucket(2048, 2048, 4)
    assert choose(ScriptedGpu(rising), bucket=large, rows=9) == 5, "8 is the largest that was tried; two launches of 5"
    small_shard = ScriptedGpu(rising)
    assert choose(small_shard, bucket=Bucket(64, 64, 4), shard_size=6) == 4
    assert small_shard.sizes == [1, 2, 4]


def test_few_rows_are_not_worth_a_measurement_but_use_what_is_known():
    flat = ScriptedGpu({1: 10.0, 2: 10.0, 4: 10.0})
    assert choose(flat, rows=16) == 16 and choose(flat, rows=100) == 15 and flat.asked == []
    assert choose(flat) == 1
    asked = len(flat.asked)
    assert choose(flat, rows=100) == 1, "remembered"
    assert choose(flat, rows=16) == 16, "one launch in any case"
    assert len(flat.asked) == asked


def test_a_number_is_never_measured():
    cfg = settings(batch_size=3)
    assert run._size_of(cfg, None, pytest.fail, None)(SQUARE, MANY) == 3  # type: ignore[arg-type]


def test_a_plan_ahead_of_the_gpus_takes_what_one_was_measured_to_do(monkeypatch: pytest.MonkeyPatch):
    cfg = settings()
    MeasuredSizes(cfg, H200, ScriptedGpu({1: 10.0, 2: 15.0, 4: 15.1}))(SQUARE, MANY)
    monkeypatch.setattr(run, "_machine", lambda cfg, rank: None)
    sizes = []
    for cfg.run.plan_only in (False, True):
        sizes.append(run._size_of(cfg, Rank(), pytest.fail, None)(SQUARE, MANY))  # type: ignore[arg-type]
    assert sizes == [16, 2]


def test_the_curve_and_the_choice_are_said_in_a_line_a_bucket(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        choose(ScriptedGpu({1: 10.0, 2: 15.0, 4: 15.1}))
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "plan.batch_size=auto: 512x512-4 on NVIDIA H200: images/s by batch size 1: 10, 2: 15, 4: 15.1; "
        "8 do not fit into 125.0 GiB; batches of 2"
    )


def test_what_was_measured_is_remembered_for_every_number_of_steps(cache: Path):
    gpu = ScriptedGpu({1: 10.0, 2: 15.0, 4: 15.1, 8: 15.1})
    assert choose(gpu) == choose(gpu) == choose(gpu, bucket=Bucket(512, 512, 50)) == 2
    assert gpu.sizes == [1, 2, 4, 8]
    [path] = cache.iterdir()
    key = json.loads(path.read_text())["key"]
    assert key["gpu"] == "NVIDIA H200" and key["settings"]["model.dtype"] == "bfloat16" and "torch" in key["versions"]


def test_what_decides_speed_is_measured_anew():
    gpu = ScriptedGpu({1: 10.0, 2: 10.0, 4: 10.0})
    choose(gpu)
    for other in (
        {"machine": Machine("NVIDIA L4", 22.0, 20.0)},
        {"bucket": Bucket(512, 768, 4)},
        {"bucket": Bucket(512, 512, 4, True)},
    ):
        asked = len(gpu.asked)
        choose(gpu, **other)
        assert len(gpu.asked) > asked, other
    cfg = settings()
    cfg.model.quantization = "fp8"
    asked = len(gpu.asked)
    MeasuredSizes(cfg, H200, gpu)(SQUARE, MANY)
    assert len(gpu.asked) > asked


def test_a_search_that_a_small_job_cut_short_goes_on_where_it_ended():
    large = Bucket(2048, 2048, 4)
    gpu = ScriptedGpu({2**n: float(2**n) for n in range(5)})
    choose(gpu, bucket=large, rows=9)
    assert gpu.sizes == [1, 2, 4, 8]
    assert choose(gpu, bucket=large) == 16
    assert gpu.sizes == [1, 2, 4, 8, 16, 32]


def test_a_smaller_budget_forgets_what_needs_more_and_a_larger_one_tries_again():
    gpu = ScriptedGpu({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, gib_per_image=10.0)
    assert choose(gpu) == 8 and gpu.sizes == [1, 2, 4, 8, 16]
    smaller = ScriptedGpu({1: 1.0, 2: 2.0})
    assert choose(smaller, machine=Machine("NVIDIA H200", 139.8, 24.0)) == 2
    assert smaller.sizes == [4], "1 and 2 fit, as is known"
    larger = ScriptedGpu({2**n: 2.0**n for n in range(6)})
    assert choose(larger, machine=Machine("NVIDIA H200", 139.8, 130.0)) == 32
    assert larger.sizes == [4, 8, 16, 32, 64]


def test_a_signal_in_mid_search_loses_only_the_size_that_was_being_measured():
    gpu = ScriptedGpu({1: 10.0, 2: 15.0, 4: 20.0, 8: 20.0, 16: 20.0})

    def interrupted(bucket: Bucket, size: int) -> LaunchCost | None:
        if size == 4:
            raise Interrupted("a signal")
        return gpu(bucket, size)

    with pytest.raises(Interrupted):
        MeasuredSizes(settings(), H200, interrupted)(SQUARE, MANY)
    assert choose(gpu) == 4 and gpu.sizes == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"[]", b'{"key": {}, "costs": [{"size": 1}]}', b"{"])
def test_a_corrupt_memory_is_a_warning(content: bytes, cache: Path, caplog: pytest.LogCaptureFixture):
    choose(ScriptedGpu({1: 10.0, 2: 15.0}))
    [path] = cache.iterdir()
    path.write_bytes(content)
    gpu = ScriptedGpu({1: 10.0, 2: 15.0})
    assert choose(gpu) == 2 and gpu.sizes == [1, 2, 4]
    assert [r.levelname for r in caplog.records if str(path) in r.getMessage()] == ["WARNING"]


def test_a_memory_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FLUXBATCH_CACHE", str(tmp_path / "file"))
    assert choose(ScriptedGpu({1: 10.0, 2: 15.0})) == 2
    assert "cannot be kept" in caplog.text


def test_plan_uses_what_any_gpu_was_measured_to_do_and_names_it(cache: Path):
    plain = RememberedSizes(settings())
    assert plain(SQUARE, MANY) == 16 and plain.measured_on == {}
    choose(ScriptedGpu({1: 10.0, 2: 15.0}))
    known = RememberedSizes(settings())
    assert known(SQUARE, MANY) == 2 and known.measured_on == {SQUARE: "NVIDIA H200"}
    assert RememberedSizes(settings(batch_size=7))(SQUARE, MANY) == 7
    on_cpu = settings()
    on_cpu.model.device = "cpu"
    assert RememberedSizes(on_cpu)(SQUARE, MANY) == 16


# The whole job: what the plan records stands.


def manifest(path: Path, count: int) -> None:
    rows = [{"id": f"r{n}", "prompt": f"prompt {n}"} for n in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def do(tmp_path: Path, load: Callable[[], FakeModel], gpu: ScriptedGpu, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    monkeypatch.setattr(run, "_machine", lambda cfg, rank: H200)
    monkeypatch.setattr(measure, "LaunchMeter", lambda model, **_: gpu)

    def job(cfg: JobConfig) -> int:
        config_rules.check(cfg)
        return run.run_job(cfg, load=lambda cfg, rank: load())[1]

    overrides = [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/run", "sampler.height=64",
                 "sampler.width=64", "sampler.num_inference_steps=4", "telemetry.progress=off"]  # fmt: skip
    assert with_config(overrides, job) == 0
    plan = RunPlan.open(RunFolder(tmp_path / "run"))
    assert plan is not None
    return plan


def test_a_first_start_measures_with_the_one_model_it_loads_and_a_resume_never(tmp_path: Path, monkeypatch):
    loaded: list[FakeModel] = []

    def load() -> FakeModel:
        loaded.append(FakeModel())
        return loaded[-1]

    manifest(tmp_path / "m.parquet", 150)
    gpu = ScriptedGpu({1: 10.0, 2: 15.0, 4: 20.0, 8: 20.0})
    plan = do(tmp_path, load, gpu, monkeypatch)
    assert [r.batch_size for r in plan.parts[0].runs] == [4]
    assert gpu.sizes == [1, 2, 4, 8, 16] and len(loaded) == 1
    (tmp_path / "run" / "_SUCCESS").unlink()
    faster = ScriptedGpu({1: 100.0, 2: 1.0})
    plan = do(tmp_path, load, faster, monkeypatch)
    assert [r.batch_size for r in plan.parts[0].runs] == [4] and faster.asked == [] and len(loaded) == 1


def test_added_rows_are_measured_too_or_remembered(tmp_path: Path, monkeypatch, cache: Path):
    manifest(tmp_path / "m.parquet", 150)
    do(tmp_path, FakeModel, ScriptedGpu({1: 10.0, 2: 15.0}), monkeypatch)
    manifest(tmp_path / "m.parquet", 300)
    gpu = ScriptedGpu({})
    plan = do(tmp_path, FakeModel, gpu, monkeypatch)
    assert [[r.batch_size for r in part.runs] for part in plan.parts] == [[2], [2]] and gpu.asked == []
    for path in cache.iterdir():
        path.unlink()
    manifest(tmp_path / "m.parquet", 450)
    plan = do(tmp_path, FakeModel, ScriptedGpu({1: 10.0}), monkeypatch)
    assert [[r.batch_size for r in part.runs] for part in plan.parts] == [[2], [2], [1]]


def test_the_verb_plan_says_which_gpu_its_sizes_were_measured_on(tmp_path: Path, monkeypatch):
    manifest(tmp_path / "m.parquet", 150)
    do(tmp_path, FakeModel, ScriptedGpu({1: 10.0, 2: 15.0}), monkeypatch)
    answers = []

    def plan(cfg: JobConfig) -> int:
        answers.append(verbs.plan(cfg))
        return 0

    with_config([f"manifest.path={tmp_path}/m.parquet", "sampler.height=64", "sampler.width=64"], plan)
    [(answer, words, _)] = answers
    assert [(b["batch_size"], b["measured_on"]) for b in answer["buckets"]] == [(2, "NVIDIA H200")]
    assert "150 rows" in words and "batches of 2 (measured on NVIDIA H200)" in words


# The meter, on the fake model.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP_S", 0.0)
    monkeypatch.setattr(measure, "TIMED_S", 0.0)


def meter(model: FakeModel, **settings: int) -> measure.LaunchMeter:
    return measure.LaunchMeter(
        model, model_cfg=ModelConfig(**settings), pipeline=PipelineConfig(), check=lambda: None
    )  # fmt: skip


def test_a_launch_is_timed_at_its_size_with_few_steps_and_both_passes(quick: None):
    model = FakeModel()
    cost = meter(model)(Bucket(16, 24, 28, negative_pass=True), 5)
    assert cost is not None and cost.size == 5 and cost.step_s > 0 and cost.decode_s > 0
    assert set(model.rows) == {10} and len(model.rows) == 3 * measure.STEPS, "a look, a warm-up, one measured"


def test_a_size_that_does_not_fit_is_no_error(quick: None):
    clock = meter(FakeModel(max_rows=4))
    assert clock(Bucket(16, 24, 4), 4) is not None
    assert clock(Bucket(16, 24, 4), 8) is None
    assert clock(Bucket(16, 24, 4), 2) is not None


def test_a_decode_that_does_not_fit_is_measured_in_smaller_launches(quick: None):
    model = FakeModel()
    decode = model.decode

    def small_decoder(latents: torch.Tensor, *, bucket: Bucket) -> torch.Tensor:
        if len(latents) > 2:
            raise torch.OutOfMemoryError("fake: the decoder takes two")
        return decode(latents, bucket=bucket)

    model.decode = small_decoder  # type: ignore[method-assign]
    assert meter(model)(Bucket(16, 24, 4), 8) is not None
    assert set(model.decoded_rows) == {2}


def test_a_signal_ends_a_measurement_between_two_steps(quick: None):
    def stop() -> None:
        raise KeyboardInterrupt

    clock = measure.LaunchMeter(FakeModel(), model_cfg=ModelConfig(), pipeline=PipelineConfig(), check=stop)
    with pytest.raises(KeyboardInterrupt):
        clock(Bucket(16, 24, 4), 1)
