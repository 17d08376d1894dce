"""Steps that are extrapolated instead of computed: which ones, how, and that rows and resumes do not notice."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import FakeModel
from test_parity import MIXED
from test_pipeline import batches, images
from test_run import data_files, do, manifest, rows, settings, sound
from tiny_models import model_config
from torch import Tensor

from fluxbatch import config, config_rules
from fluxbatch.config import ModelConfig, OutputConfig, PipelineConfig, SamplerConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models import Flow, PromptEmbeds, load_model
from fluxbatch.pipeline.denoise import denoise
from fluxbatch.pipeline.extrapolate import extrapolated
from fluxbatch.pipeline.loop import run_pipeline
from fluxbatch.plan import estimate
from fluxbatch.records import Bucket, CompressedBatch
from fluxbatch.step_cache import EVERY_STEP, SCHEDULES, StepCache

LONG = Bucket(16, 24, 12)


class CurvedModel(FakeModel):
    """The fake, whose velocity in the channel of the prompt is a parabola of the noise level."""

    def flow(self, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Flow:
        plain = super().flow(embeds=embeds, guidance=guidance, bucket=bucket)
        sigmas = self.schedule(bucket).sigmas

        def velocity(latents: Tensor, step: int) -> Tensor:
            return plain(latents, step) * (1 + 3 * sigmas[step] + 5 * sigmas[step] ** 2)

        return velocity


def run(source: Any, cache: StepCache, *, mode: str = "double_buffered", model: Any = None) -> list[CompressedBatch]:
    return list(
        run_pipeline(
            source,
            model or CurvedModel(),
            pipeline=PipelineConfig(mode=mode, compress_workers=2),
            model_cfg=ModelConfig(),
            output=OutputConfig(image_format="png", png_level=1),
            step_cache=cache,
        )
    )


# --- which steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5, 8, 20, 28, 50])
def test_schedules_compute_the_first_steps_and_the_last_and_never_two_gaps_in_a_row(
    schedule: str, num_steps: int
) -> None:
    computed = StepCache(schedule).computed(num_steps)
    assert computed[:2] == tuple(range(min(2, num_steps))) and computed[-1] == num_steps - 1
    assert list(computed) == sorted(set(computed))
    distances = [b - a for a, b in itertools.pairwise(computed)]
    assert max(distances, default=1) <= SCHEDULES[schedule][1]
    assert num_steps >= 5 or computed == tuple(range(num_steps)), "distilled models skip nothing"


def test_bolder_schedules_compute_less() -> None:
    assert [len(StepCache(name).computed(20)) for name in ("off", *SCHEDULES)] == [20, 15, 13, 10]
    assert [len(StepCache(name).computed(28)) for name in ("off", *SCHEDULES)] == [28, 21, 19, 14]


def test_a_list_of_steps_is_taken_as_it_is_and_reaches_no_further_than_the_row() -> None:
    assert StepCache((0, 1, 4, 9)).computed(20) == (0, 1, 4, 9)
    assert StepCache((0, 1, 4, 9)).computed(5) == (0, 1, 4)


@pytest.mark.parametrize("wrong", ["on", True, [], [1, 2], [0, 2, 2], [0, 3, 1], [0, 1.5], [0, -1], 3])
def test_another_schedule_is_refused_with_the_choices(wrong: Any) -> None:
    _, holds, rule = next(known for known in config_rules.RULES if known[0] == "sampler.step_cache")
    assert not holds(wrong)
    assert "off, conservative, medium, aggressive" in rule


def test_what_yaml_makes_of_off_is_off() -> None:
    assert config.step_cache(SamplerConfig(step_cache=False)) == EVERY_STEP


# --- extrapolation ----------------------------------------------------------------------------------------------------

SIGMAS = torch.tensor([1.0, 0.93, 0.8, 0.71, 0.52, 0.4, 0.23, 0.11, 0.0])


@pytest.mark.parametrize("order", [1, 2])
def test_a_polynomial_of_its_order_is_extrapolated_exactly_over_uneven_steps(order: int) -> None:
    curve = lambda sigma: sum((k + 1.5) * sigma**k for k in range(order + 1))  # noqa: E731
    asked: list[int] = []

    def flow(latents: Tensor, step: int) -> Tensor:
        asked.append(step)
        return torch.full((2, 3, 4), float(curve(SIGMAS[step])))

    computed = [0, 1, 2, 5]
    velocity = extrapolated(flow, SIGMAS, computed=computed, num_steps=8, order=order)
    for step in range(8):
        assert velocity(torch.zeros(2, 3, 4), step).mean() == pytest.approx(float(curve(SIGMAS[step])), abs=1e-4)
    assert asked == computed


def test_with_one_known_step_its_velocity_goes_on() -> None:
    velocity = extrapolated(lambda x, step: torch.ones(1, 1, 1), SIGMAS, computed=[0], num_steps=8, order=2)
    assert [float(velocity(torch.zeros(1), step)) for step in range(8)] == [1.0] * 8


# --- whole pictures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["serial", "double_buffered"])
def test_a_schedule_of_all_steps_gives_the_bytes_of_off(mode: str) -> None:
    off, all_steps, some = (
        images(run(batches(3, bucket=LONG), cache, mode=mode))
        for cache in (EVERY_STEP, StepCache(tuple(range(12)), order=2), StepCache("aggressive"))
    )
    assert all_steps == off
    assert all(some[name] != off[name] for name in off), "nothing was extrapolated"


def test_both_pipelines_give_equal_bytes() -> None:
    serial, double = (
        images(run(batches(4, bucket=LONG), StepCache("aggressive"), mode=mode))
        for mode in ("serial", "double_buffered")
    )
    assert serial == double


def test_guidance_passes_are_extrapolated_together_and_not_asked() -> None:
    bucket = replace(LONG, negative_pass=True)
    model = CurvedModel()
    source = batches(1, bucket=bucket, negative_prompt="blurry", guidance_scale=2.0)
    drawn = images(run(source, StepCache((0, 1, 2, 6), order=2), model=model))
    exact = images(run(source, EVERY_STEP))
    assert model.calls["velocity"] == 4
    assert drawn == exact, "the parabola goes through the three steps that are known"


@pytest.fixture(scope="module")
def embedded() -> Any:
    return load_model(model_config(max_sequence_length=64), true_cfg_scale=2.0)


def draw(model: Any, chosen: list[Any], cache: StepCache, *, steps: int = 8) -> Tensor:
    bucket = Bucket(64, 64, steps)
    shape = model.noise_shape(height=64, width=64)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(row.seed)) for row in chosen]
    return denoise(
        model,
        torch.stack(noise),
        embeds=model.encode(model.tokenize([row.prompt for row in chosen]).tensors),
        negative_embeds=None,
        guidance=torch.tensor([row.guidance_scale for row in chosen]),
        bucket=bucket,
        before_step=lambda: None,
        step_cache=cache,
    )


@pytest.mark.parametrize("order", [1, 2])
def test_a_row_keeps_its_bits_whatever_its_neighbours_and_its_slot(embedded: Any, order: int) -> None:
    cache, chosen = StepCache("aggressive", order=order), MIXED[:3]
    forth, back = draw(embedded, chosen, cache), draw(embedded, chosen[::-1], cache).flip(0)
    others = draw(embedded, [chosen[0], MIXED[3], MIXED[3]], cache)
    assert torch.equal(forth, back)
    assert torch.equal(others[0], forth[0])


def test_the_bolder_the_schedule_the_farther_from_the_exact_picture(embedded: Any) -> None:
    exact = draw(embedded, MIXED[:2], EVERY_STEP, steps=12)
    distances = [float((draw(embedded, MIXED[:2], StepCache(name), steps=12) - exact).norm()) for name in SCHEDULES]
    assert 0 < distances[0] < distances[1] < distances[2] < float(exact.norm()) / 2


def test_the_first_steps_of_few_are_computed(embedded: Any) -> None:
    """A line through two steps of eight once led farther from the picture than it is long."""
    exact = draw(embedded, MIXED[:2], EVERY_STEP)
    assert float((draw(embedded, MIXED[:2], StepCache("aggressive")) - exact).norm()) < float(exact.norm()) / 4


# --- a job ------------------------------------------------------------------------------------------------------------


def test_a_job_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    chosen = ("sampler.num_inference_steps=8", "sampler.step_cache=medium")
    with pytest.raises(RuntimeError):
        do(settings(tmp_path, *chosen, "output=parquet"), lambda: CurvedModel(fail_at={"decode": 4}))
    do(settings(tmp_path, *chosen), CurvedModel)
    do(settings(tmp_path, *chosen, out="whole"), CurvedModel)
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")
    sound(tmp_path / "run")


def test_a_job_says_that_it_approximates_and_refuses_to_go_on_otherwise(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(8))
    do(settings(tmp_path, "sampler.step_cache=[0,1]", "sampler.step_cache_order=2"), CurvedModel)
    folder = tmp_path / "run"
    stored = json.loads((folder / "job.json").read_text())
    assert stored["fingerprint"]["sampler.step_cache"] == [0, 1]
    assert stored["settings"]["sampler"]["step_cache_order"] == 2
    assert (
        "| step cache | \\[0, 1\\], order 2: the other steps are extrapolated, an approximation |"
        in (folder / "README.md").read_text()
    )
    assert "step cache [0, 1], order 2: an approximation" in (folder / "report.html").read_text()
    with pytest.raises(ConfigError, match=r"sampler.step_cache must be \[0, 1\], got 'off'"):
        do(settings(tmp_path, "sampler.step_cache_order=2"), CurvedModel)


def test_a_run_folder_of_before_there_was_a_step_cache_goes_on(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(8))
    do(settings(tmp_path))
    job = tmp_path / "run" / "job.json"
    stored = json.loads(job.read_text())
    for key in ("sampler.step_cache", "sampler.step_cache_order", "model.loras"):
        del stored["fingerprint"][key]
    job.write_text(json.dumps(stored))
    do(settings(tmp_path))
    assert "step cache" not in (tmp_path / "run" / "README.md").read_text()


def test_plan_counts_the_steps_that_are_computed() -> None:
    def tflop(**sampler: Any) -> float:
        cache = config.step_cache(SamplerConfig(**sampler))
        return estimate.COSTS["flux1_dev"].image_tflop(Bucket(1024, 1024, 28), text_tokens=512, step_cache=cache)

    exact, decode = tflop(), 10.5
    assert tflop(step_cache="aggressive") - decode == pytest.approx((exact - decode) / 2)
    assert tflop(step_cache=[0, 1, 2, 3]) - decode == pytest.approx((exact - decode) / 7)
