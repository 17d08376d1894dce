"""Row by row, out of mixed batches, we draw what diffusers' own pipelines draw: within 1 of 255, float32 on a CPU."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, FluxPipeline
from tiny_models import FLUX1_SCHEDULER, FLUX2_SCHEDULER, MAX_SEQUENCE_LENGTH, flux1_parts, flux2_parts, model_config

from fluxbatch import tiny
from fluxbatch.models import Model, load_model
from fluxbatch.models.flux1 import Flux1
from fluxbatch.models.flux2 import Flux2
from fluxbatch.models.schedule import flow_schedule, flux1_mu, flux2_mu
from fluxbatch.pipeline.decode import to_uint8
from fluxbatch.pipeline.denoise import denoise
from fluxbatch.records import Bucket, Request

TRUE_CFG_SCALE = 2.5


def request(
    prompt: str,
    *,
    seed: int,
    guidance: float = 3.5,
    size: tuple[int, int] = (64, 64),
    steps: int = 3,
    negative: str = "",
) -> Request:
    return Request(
        id=f"{prompt}-{seed}",
        prompt=prompt,
        negative_prompt=negative or None,
        height=size[0],
        width=size[1],
        num_inference_steps=steps,
        guidance_scale=guidance,
        seed=seed,
    )


MIXED = [
    request("a red circle", seed=1, guidance=1.0),
    request("two blue squares on a yellow background", seed=2, guidance=5.0),
    request("a purple cat at night", seed=2**40 + 3, guidance=3.5),
    request("a green star", seed=4, guidance=0.0),
    request("a cat in the snow " * 30, seed=5, guidance=2.0, size=(32, 96), steps=2),
    request("a red circle", seed=-6, guidance=7.5, size=(32, 96), steps=2),
    request("an orange ring", seed=7, size=(96, 64), steps=1),
]


def pixels(model: Model, requests: Sequence[Request], *, negative_pass: bool = False) -> list[np.ndarray]:
    """Our stages on each bucket's rows as one batch; one (H, W, 3) uint8 image a request, in order."""
    images: dict[str, np.ndarray] = {}
    for key in dict.fromkeys((r.height, r.width, r.num_inference_steps) for r in requests):
        rows = [r for r in requests if (r.height, r.width, r.num_inference_steps) == key]
        batch = draw(model, rows, Bucket(*key, negative_pass=negative_pass))
        images |= {row.id: image for row, image in zip(rows, batch, strict=True)}
    return [images[r.id] for r in requests]


def draw(model: Model, rows: Sequence[Request], bucket: Bucket) -> np.ndarray:
    shape = model.noise_shape(height=bucket.height, width=bucket.width)
    noise = [torch.randn(shape, generator=torch.Generator("cpu").manual_seed(row.seed)) for row in rows]
    negatives = [row.negative_prompt or "" for row in rows]
    latents = denoise(
        model,
        torch.stack(noise),
        embeds=model.encode(model.tokenize([row.prompt for row in rows]).tensors),
        negative_embeds=model.encode(model.tokenize(negatives).tensors) if bucket.negative_pass else None,
        guidance=torch.tensor([row.guidance_scale for row in rows]),
        bucket=bucket,
        before_step=lambda: None,
    )
    return to_uint8(model.decode(latents, bucket=bucket)).numpy()


def reference(pipeline: Any, row: Request, **options: Any) -> np.ndarray:
    """What a user of diffusers gets for this row alone."""
    pipeline.set_progress_bar_config(disable=True)
    settings = {
        "guidance_scale": row.guidance_scale,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "generator": torch.Generator("cpu").manual_seed(row.seed),
    }
    (image,) = pipeline(
        prompt=row.prompt,
        height=row.height,
        width=row.width,
        num_inference_steps=row.num_inference_steps,
        **{**settings, **options},
    ).images
    return np.asarray(image)


def distance(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def assert_same_pictures(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    assert [distance(a, b) for a, b in zip(ours, theirs, strict=True)] == pytest.approx([0] * len(ours), abs=1)
    assert all(image.std() > 10 for image in theirs), "a flat picture proves nothing"


def flux1(parts: dict[str, Any], **changes: Any) -> Flux1:
    cfg = model_config(**changes)
    return Flux1(**parts, scheduler_config=FLUX1_SCHEDULER, cfg=cfg, true_cfg_scale=TRUE_CFG_SCALE)


def flux1_pipeline(parts: dict[str, Any]) -> FluxPipeline:
    return FluxPipeline(**parts, scheduler=FlowMatchEulerDiscreteScheduler(**FLUX1_SCHEDULER))


def flux2(parts: dict[str, Any]) -> Flux2:
    """On copies: our model drops the layers of the text encoder that klein does not read."""
    text_encoder = deepcopy(parts["text_encoder"]).model
    cfg = model_config(family="flux2", name="flux2_klein_4b")
    return Flux2(**{**parts, "text_encoder": text_encoder}, scheduler_config=FLUX2_SCHEDULER, cfg=cfg)


def flux2_pipeline(parts: dict[str, Any], *, is_distilled: bool) -> Flux2KleinPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler(**FLUX2_SCHEDULER)
    return Flux2KleinPipeline(**parts, scheduler=scheduler, is_distilled=is_distilled)


def test_flux1_rows_of_a_mixed_batch_equal_diffusers() -> None:
    parts = flux1_parts()
    pipeline = flux1_pipeline(parts)
    assert_same_pictures(pixels(flux1(parts), MIXED), [reference(pipeline, row) for row in MIXED])


def test_flux1_without_guidance_embedding_equals_diffusers() -> None:
    parts = flux1_parts(guidance_embeds=False)
    model, pipeline = flux1(parts, guidance="none"), flux1_pipeline(parts)
    assert_same_pictures(pixels(model, MIXED[:4]), [reference(pipeline, row) for row in MIXED[:4]])


def test_flux1_negative_prompts_equal_true_cfg_of_diffusers() -> None:
    rows = [
        request("a red circle", seed=1, guidance=1.0, negative="a blue square"),
        request("a purple cat", seed=2, guidance=4.0, negative="at night"),
        request("a star", seed=3, guidance=2.0, size=(32, 96), negative="big"),
    ]
    parts = flux1_parts()
    pipeline = flux1_pipeline(parts)
    theirs = [
        reference(pipeline, row, negative_prompt=row.negative_prompt, true_cfg_scale=TRUE_CFG_SCALE) for row in rows
    ]
    assert_same_pictures(pixels(flux1(parts), rows, negative_pass=True), theirs)
    assert distance(theirs[0], reference(pipeline, rows[0])) > 5


def test_klein_distilled_rows_of_a_mixed_batch_equal_diffusers() -> None:
    parts = flux2_parts()
    pipeline = flux2_pipeline(parts, is_distilled=True)
    assert_same_pictures(pixels(flux2(parts), MIXED), [reference(pipeline, row) for row in MIXED])


def test_klein_base_with_guidance_per_row_equals_diffusers() -> None:
    rows = [row for row in MIXED if row.guidance_scale > 1]
    parts = flux2_parts()
    pipeline = flux2_pipeline(parts, is_distilled=False)
    theirs = [reference(pipeline, row) for row in rows]
    assert_same_pictures(pixels(flux2(parts), rows, negative_pass=True), theirs)
    assert distance(theirs[0], reference(pipeline, rows[0], guidance_scale=1.0)) > 5


@pytest.fixture(scope="module")
def embedded() -> Model:
    return load_model(model_config(max_sequence_length=64), true_cfg_scale=TRUE_CFG_SCALE)


def test_embedded_model_equals_diffusers_on_its_folder(embedded: Model) -> None:
    rows = [
        request("a red circle on a blue background", seed=11, guidance=3.5, size=(128, 128), steps=4),
        request("two yellow stars at night", seed=12, guidance=1.5, size=(128, 128), steps=4),
    ]
    pipeline = FluxPipeline.from_pretrained(tiny.FOLDER, dtype=torch.float32)
    theirs = [reference(pipeline, row, max_sequence_length=64) for row in rows]
    assert_same_pictures(pixels(embedded, rows), theirs)
    corner = theirs[0][:16, :16].reshape(-1, 3).mean(0)
    assert corner.argmax() == 2, f"a blue background, got {corner}"


@pytest.mark.parametrize(
    ("parts", "make", "change"),
    [
        pytest.param(flux1_parts, flux1, {"guidance_scale": 6.0}, id="flux1-guidance"),
        pytest.param(flux1_parts, flux1, {"prompt": "a blue circle"}, id="flux1-prompt"),
        pytest.param(flux1_parts, flux1, {"num_inference_steps": 2}, id="flux1-steps"),
        pytest.param(flux2_parts, flux2, {"prompt": "a blue circle"}, id="flux2-prompt"),
        pytest.param(flux2_parts, flux2, {"num_inference_steps": 2}, id="flux2-steps"),
    ],
)
def test_what_parity_compares_shows_in_the_pixels(
    parts: Callable[[], dict[str, Any]], make: Callable[[dict[str, Any]], Model], change: dict[str, Any]
) -> None:
    """Otherwise the tests above would pass with the input ignored."""
    row = {"prompt": MIXED[0].prompt, "guidance_scale": 1.0, "num_inference_steps": 3}
    model = make(parts())

    def image(values: dict[str, Any]) -> np.ndarray:
        steps, guidance = values["num_inference_steps"], values["guidance_scale"]
        (only,) = pixels(model, [request(values["prompt"], seed=1, guidance=guidance, steps=steps)])
        return only

    assert distance(image(row), image({**row, **change})) > 5


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_br14_br17_a_rows_bits_depend_on_neither_slot_nor_neighbours(embedded: Model, num_threads: int) -> None:
    """At one batch size of 4, float32, through every stage."""
    row = request("a red circle", seed=1, guidance=3.5, steps=2)
    others = [request(text, seed=20 + i, guidance=1.0 + i, steps=2) for i, text in enumerate(("a cat", "", "x " * 90))]
    bucket = Bucket(64, 64, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = draw_float(embedded, [row] * 4, bucket)
        for slot in range(4):
            rows = [*others[:slot], row, *others[slot:]]
            mixed = draw_float(embedded, rows, bucket)
            assert all(torch.equal(mixed[name][slot], alone[name][0]) for name in alone), f"slot {slot}"
    finally:
        torch.set_num_threads(before)


def draw_float(model: Model, rows: Sequence[Request], bucket: Bucket) -> dict[str, torch.Tensor]:
    """Every stage's output before rounding."""
    shape = model.noise_shape(height=bucket.height, width=bucket.width)
    noise = torch.stack([torch.randn(shape, generator=torch.Generator("cpu").manual_seed(row.seed)) for row in rows])
    guidance = torch.tensor([row.guidance_scale for row in rows])
    embeds = model.encode(model.tokenize([row.prompt for row in rows]).tensors)
    latents = denoise(
        model, noise, embeds=embeds, negative_embeds=None, guidance=guidance, bucket=bucket, before_step=lambda: None
    )
    return {**embeds, "latents": latents, "pixels": model.decode(latents, bucket=bucket)}


# mu and sigmas as diffusers' pipelines gave them (float32, printed to 6 places); L = image tokens
DEV = {**FLUX1_SCHEDULER, "base_image_seq_len": 256, "max_image_seq_len": 4096}
SCHNELL = {"shift": 1.0, "use_dynamic_shifting": False}
DEV_4096 = [1, 0.988409, 0.976222, 0.963394, 0.949873, ..., 0.344849, 0.274828, 0.195455, 0.104721, 0]


@pytest.mark.parametrize(
    ("num_tokens", "steps", "mu", "sigmas"),
    [
        (4096, 4, 2.2912, [1, 0.967384, 0.908144, 0.767200, 0]),
        (1024, 4, 2.0307, [1, 0.958085, 0.883982, 0.717497, 0]),
        (2304, 4, 2.1392, [1, 0.962234, 0.894658, 0.738969, 0]),
        (9216, 4, 2.0167, [1, 0.957518, 0.882535, 0.714644, 0]),
        (4096, 50, 2.0234, [1, 0.997309, 0.994521, 0.991632, 0.988634, 0.985523, ...]),
    ],
)
def test_flux2_schedule(num_tokens: int, steps: int, mu: float, sigmas: list[Any]) -> None:
    assert flux2_mu(num_tokens, steps) == pytest.approx(mu, abs=5e-5)
    assert_sigmas(FLUX2_SCHEDULER, steps, flux2_mu(num_tokens, steps), sigmas)


@pytest.mark.parametrize(
    ("config", "num_tokens", "steps", "mu", "sigmas"),
    [
        (DEV, 4096, 28, 1.15, DEV_4096),
        (DEV, 1024, 28, 0.63, [1, 0.980656, 0.960644, 0.939928, 0.918472, ...]),
        (DEV, 256, 1, 0.5, [1, 0]),
        (DEV, 2304, 1, 0.8467, [1, 0]),
        (DEV, 9216, 1, 2.0167, [1, 0]),
        (DEV, 16384, 1, 3.23, [1, 0]),
        (SCHNELL, 4096, 4, 1.15, [1, 0.75, 0.5, 0.25, 0]),
    ],
)
def test_flux1_schedule(config: dict[str, Any], num_tokens: int, steps: int, mu: float, sigmas: list[Any]) -> None:
    assert flux1_mu(num_tokens, config) == pytest.approx(mu, abs=5e-5)
    assert_sigmas(config, steps, flux1_mu(num_tokens, config), sigmas)


def assert_sigmas(config: dict[str, Any], steps: int, mu: float, expected: list[Any]) -> None:
    """`...` in `expected` stands for any number of sigmas."""
    schedule = flow_schedule(config, num_inference_steps=steps, mu=mu, device=torch.device("cpu"))
    assert (len(schedule.timesteps), len(schedule.sigmas)) == (steps, steps + 1)
    assert torch.equal(schedule.timesteps, schedule.sigmas[:-1] * 1000)
    gap = expected.index(...) if ... in expected else len(expected)
    head, tail = expected[:gap], expected[gap + 1 :]
    assert schedule.sigmas[: len(head)].tolist() == pytest.approx(head, abs=1e-6)
    assert schedule.sigmas[len(schedule.sigmas) - len(tail) :].tolist() == pytest.approx(tail, abs=1e-6)
