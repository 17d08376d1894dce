"""Pipelines of other families, called whole: each row as the pipeline draws it by hand, whoever shares its call."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image
from tiny_pipelines import BATCHED, BUILD, save
from torch import Tensor

from fluxbatch.config import ModelConfig, OutputConfig, PipelineConfig
from fluxbatch.errors import FluxbatchError
from fluxbatch.model_folder import describe
from fluxbatch.models import WholeModel, check_model
from fluxbatch.models.whole import WholePipeline
from fluxbatch.pipeline.loop import run_pipeline
from fluxbatch.pipeline.ring import Stopped
from fluxbatch.records import Batch, BatchPlan, Bucket, CompressedBatch, Request

SIDE, STEPS, GUIDANCE = 64, 2, 4.0
BUCKET = Bucket(SIDE, SIDE, STEPS, negative_pass=True, guidance_scale=GUIDANCE)
LONG = "a cat in the snow " * 40


def config(folder: Path) -> ModelConfig:
    return ModelConfig(
        name="diffusers", family="diffusers", path=str(folder), dtype="float32", device="cpu", max_sequence_length=0
    )


def row(number: int, prompt: str, negative: str | None = None, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "id": f"{number}",
        "prompt": prompt,
        "negative_prompt": negative,
        "height": SIDE,
        "width": SIDE,
        "num_inference_steps": STEPS,
        "guidance_scale": GUIDANCE,
        "seed": 2**33 + number,
    }
    return Request(**{**fields, **changes})


ROWS = [row(1, "a red circle"), row(2, "two blue squares", "at night"), row(3, LONG)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny pipeline, saved once."""
    root = tmp_path_factory.mktemp("pipelines")
    return lambda name: root / name if (root / name).exists() else save(name, root / name)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as model.cpu_threads has it
    yield
    torch.set_num_threads(before)


@cache
def load(folder: Path) -> WholePipeline:
    return WholePipeline.load(config(folder), true_cfg_scale=2.0)


def run(model: WholeModel, rows: Sequence[Request], *, size: int) -> CompressedBatch:
    """One batch through the pipeline of a job; the codec is left out of what is looked at."""
    batch = Batch(BatchPlan(0, 0, BUCKET, 0, len(rows), size), tuple(rows))
    pipeline = PipelineConfig(mode="serial", depth=1)
    [done] = run_pipeline(
        [batch], model, pipeline=pipeline, model_cfg=ModelConfig(), output=OutputConfig(kind="parquet")
    )
    return done


def images(done: CompressedBatch) -> list[bytes | None]:
    return [result.image for result in done.results]


def pixels(image: bytes | None) -> np.ndarray:
    assert image is not None
    return np.asarray(Image.open(io.BytesIO(image)))


@cache
def loaded_by_hand(folder: Path) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def by_hand(folder: Path, request: Request) -> np.ndarray:
    """What a person gets who calls the pipeline for this row alone."""
    pipeline = loaded_by_hand(folder)
    facts = describe(config(folder))
    options: dict[str, Any] = {str(facts.guidance_key): request.guidance_scale}
    if request.negative_prompt or facts.guidance_key == "true_cfg_scale":
        options["negative_prompt"] = request.negative_prompt or ""
    if "use_resolution_binning" in facts.arguments:
        options["use_resolution_binning"] = False
    generator = torch.Generator("cpu").manual_seed(request.seed)
    size = {"height": request.height, "width": request.width}
    steps = request.num_inference_steps
    return np.asarray(
        pipeline(request.prompt, num_inference_steps=steps, generator=generator, **size, **options).images[0]
    )


@pytest.mark.parametrize("name", list(BUILD))
def test_a_row_in_a_call_of_its_own_is_the_picture_that_the_pipeline_draws_by_hand(
    name: str, folder: Callable[[str], Path]
) -> None:
    model = load(folder(name))
    for request in (ROWS[0], ROWS[1]):
        wanted = by_hand(folder(name), request)
        assert wanted.std() > 10, "a flat picture proves nothing"
        [image] = images(run(model, [request], size=1))
        np.testing.assert_array_equal(pixels(image), wanted)


@pytest.mark.parametrize("name", BATCHED)
def test_a_row_of_a_shared_call_has_the_same_bytes_in_any_slot_beside_anybody(
    name: str, folder: Callable[[str], Path]
) -> None:
    """Short and long prompts, with negative prompts and without; the last launch is padded."""
    model = load(folder(name))
    together = images(run(model, ROWS, size=3))
    assert images(run(model, [ROWS[2], ROWS[0], ROWS[1]], size=3)) == [together[2], together[0], together[1]]
    assert images(run(model, [ROWS[1]], size=3)) == [together[1]]
    for request, image in zip(ROWS[:2], together, strict=False):
        distance = np.abs(pixels(image).astype(int) - by_hand(folder(name), request).astype(int))
        assert distance.max() <= 1, "rounding only: the launch is larger"


def attended(model: WholePipeline, rows: Sequence[Request], patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the keys of each attention of a call."""
    shapes: list[tuple[int, ...]] = []
    attention = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *arguments: Any, **options: Any) -> Tensor:
        shapes.append(tuple(key.shape))
        return attention(query, key, *arguments, **options)

    with patch.context() as patched, torch.inference_mode():
        patched.setattr(F, "scaled_dot_product_attention", watched)
        model.draw(rows, bucket=BUCKET, seams=NoSeams())
    assert shapes
    return shapes


@pytest.mark.parametrize("name", list(BUILD))
def test_rows_share_a_call_only_where_no_attention_is_cut_to_the_longest_prompt(
    name: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why some get a call a row: beside a long prompt the keys of a short one's attention are more."""
    model = load(folder(name))
    beside_itself = attended(model, [ROWS[0], ROWS[0]], monkeypatch)
    beside_long = attended(model, [ROWS[0], ROWS[2]], monkeypatch)
    assert (beside_itself == beside_long) == (name in BATCHED) == describe(config(folder(name))).batched


class NoSeams:
    """Looks at nothing."""

    def before_step(self) -> None: ...

    def decode(self, decode: Callable[[Tensor], Tensor], latents: Tensor) -> Tensor:
        return torch.cat([decode(part) for part in latents.split(1)])


def test_which_prompts_are_cut_is_told(folder: Callable[[str], Path]) -> None:
    """SD3's T5 reads 256 tokens, SDXL's CLIP 77; Z-Image 512."""
    for name, words, cut in (("sd3", 20, False), ("sd3", 300, True), ("sdxl", 90, True), ("z_image", 600, True)):
        assert load(folder(name)).tokenize(["a " * words, "a"]).truncated == (cut, False), (name, words)


# --- what the job needs of a call: failures, memory, stops ------------------------------------------------------------


@pytest.fixture(scope="module")
def sd3(folder: Callable[[str], Path]) -> WholePipeline:
    return load(folder("sd3"))


def test_a_row_whose_latents_are_not_finite_fails_alone(sd3: WholePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = sd3._pipeline.transformer

    def broken(hidden_states: Tensor, **options: Any) -> Any:
        [velocity] = forward(hidden_states=hidden_states, **options)
        velocity[1::3] = torch.nan  # the second of three rows, in both passes
        return (velocity,)

    forward = transformer.forward
    whole = images(run(sd3, ROWS, size=3))
    monkeypatch.setattr(transformer, "forward", broken)
    done = run(sd3, ROWS, size=3)
    assert images(done) == [whole[0], None, whole[2]]
    failure = done.results[1].failure
    assert (failure.stage, failure.reason) == ("denoise", "non_finite")


def test_infinite_pixels_fail_their_row_before_they_are_clamped(
    sd3: WholePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = sd3._decode

    def broken(latents: Tensor, **options: Any) -> Any:
        image = decoded(latents, **options)[0].clone()
        image[:, 0, 0, 0] = torch.inf
        return (image,)

    monkeypatch.setattr(sd3, "_decode", broken)
    [result] = run(sd3, ROWS[:1], size=1).results
    assert result.failure and (result.failure.stage, result.failure.reason) == ("decode", "non_finite")


def test_out_of_memory_halves_the_call_and_goes_on(sd3: WholePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = sd3._pipeline.transformer
    forward = transformer.forward

    def tight(hidden_states: Tensor, **options: Any) -> Any:
        if len(hidden_states) > 4:  # two passes of two rows
            raise torch.OutOfMemoryError("fake: no room")
        return forward(hidden_states=hidden_states, **options)

    alone = [images(run(sd3, [request], size=2))[0] for request in ROWS]
    monkeypatch.setattr(transformer, "forward", tight)
    done = run(sd3, ROWS, size=4)
    assert done.times.out_of_memory_splits == 1
    assert images(done) == alone


def test_sana_that_finds_no_memory_to_decode_is_halved_too(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipeline catches torch's error there, and would go on without an image."""
    model = load(folder("sana"))
    decoded, calls = model._decode, []

    def tight(latents: Tensor, **options: Any) -> Any:
        calls.append(len(latents))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("fake: no room")
        return decoded(latents, **options)

    monkeypatch.setattr(model, "_decode", tight)
    done = run(model, ROWS[:2], size=2)
    assert done.times.out_of_memory_splits == 1 and all(images(done))


class Ends(NoSeams):
    """A run that is torn down when the call comes up for its third step."""

    def __init__(self) -> None:
        self.asked = 0

    def before_step(self) -> None:
        self.asked += 1
        if self.asked == 3:
            raise Stopped


@pytest.mark.parametrize("name", ["sd3", "pixart"])
def test_a_call_ends_between_two_steps(
    name: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either kind of callback: pixart's pipeline has the old one."""
    model, taken = load(folder(name)), []
    step = model._pipeline.scheduler.step
    counted = lambda *arguments, **options: taken.append(1) or step(*arguments, **options)  # noqa: E731
    monkeypatch.setattr(model._pipeline.scheduler, "step", counted)
    bucket = Bucket(SIDE, SIDE, 20, negative_pass=True, guidance_scale=GUIDANCE)
    with pytest.raises(Stopped):
        model.draw(ROWS[:1], bucket=bucket, seams=Ends())
    assert len(taken) == 2


def test_the_stages_of_a_call_are_timed_apart(sd3: WholePipeline) -> None:
    times = run(sd3, ROWS[:1], size=1).times
    assert times.denoise_ms > 0 and times.decode_ms > 0 and times.encode_ms == 0


def test_the_settings_in_the_file_name_the_pipelines_own_sampler(folder: Callable[[str], Path]) -> None:
    [image] = images(run(load(folder("sd15")), ROWS[:1], size=1))
    assert image is not None and b"Sampler: EulerAncestralDiscrete" in image


# --- what is refused before, or while, weights are read ---------------------------------------------------------------


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink(), "vae has no weights"),
        (lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"x"), "cannot be loaded"),
        (lambda folder: _edit(folder / "model_index.json", vae=["my_code", "Vae"]), "vae comes from 'my_code'"),
        (lambda folder: _edit(folder / "vae" / "config.json", auto_map={"x": "y"}), "vae/config.json has an auto_map"),
        (lambda folder: _edit(folder / "model_index.json", vae=["diffusers", "No"]), "diffusers has no No here"),
        (lambda folder: _edit(folder / "transformer" / "config.json", num_layers=3), "transformer lacks"),
    ],
)
def test_a_folder_that_cannot_be_trusted_or_lacks_weights_is_refused(
    break_it: Callable[[Path], None], sentence: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    own = shutil.copytree(folder("pixart"), tmp_path / "own")
    break_it(own)
    with pytest.raises(FluxbatchError) as refused:
        check_model(config(own))
        load(own)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
