"""What a plan will cost: hours, bytes and memory, each with its range and with what it rests on. Pure arithmetic.

Hours rest on rates that earlier runs measured (`rates.Known`); where this shape was never drawn, on those of other
shapes, scaled by FLOP counts; where nothing was measured, on a FLOP model at a rate that one H200 was seen to reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fluxbatch import config
from fluxbatch.config import JobConfig, ModelConfig
from fluxbatch.plan.rates import Known, bytes_per_pixel
from fluxbatch.records import Bucket
from fluxbatch.step_cache import EVERY_STEP, StepCache

# Bytes a pixel, RGB. Photographs: medians of common test images; the codecs' own spread is a factor of two.
BYTES_PER_PIXEL = {"png": 1.5, "jpeg": 0.45, "webp": 0.35}
LEAST_BYTES_PER_PIXEL = {"png": 0.05, "jpeg": 0.02, "webp": 0.01}  # flat drawings; no photograph comes near
CODEC_SPREAD = 2.0
MEASURED_BYTES_SPREAD = 1.25  # prompts differ between jobs
SCALED_SPREAD = 1.25  # from one shape to another by FLOPs
FLOP_MODEL_SPREAD = (0.85, 1.6)  # an untuned batch size, another card of the same kind, a busy host
WORKING_GIB = 6.0  # beside the weights, as `models/residency.py` counts it; plan may not import that


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure with its range."""

    low: float
    likely: float
    high: float

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def __mul__(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.likely * factor, self.high * factor)


NOTHING = Spread(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one bucket to be drawn, as so many launched images: padding costs what images do."""

    bucket: Bucket
    rows: int
    launched: int


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOP counts of one architecture (1 multiply-add = 2 FLOP), and rates that it was seen to reach.

    S tokens cost 2 * macs_per_token * width^2 * blocks * S in matrix products, 4 * S^2 * width * blocks in attention.
    """

    blocks: int
    width: int
    macs_per_token: float  # of one block, in units of width^2
    decode_tflop_per_megapixel: float
    hardware: str
    tflop_per_s: dict[str, float]  # end to end, by recipe; measured, or taken from the nearest relative
    latent_pixels: int = 16  # side of one latent token in pixels

    def image_tflop(self, bucket: Bucket, *, text_tokens: int, step_cache: StepCache = EVERY_STEP) -> float:
        """Of one image, from its noise to its pixels. Steps that are extrapolated cost next to nothing."""
        area = bucket.height * bucket.width
        tokens = area // self.latent_pixels**2 + text_tokens
        products = 2 * self.macs_per_token * self.width**2 * self.blocks * tokens
        attention = 4 * tokens**2 * self.width * self.blocks
        passes = len(step_cache.computed(bucket.num_inference_steps)) * (2 if bucket.negative_pass else 1)
        return passes * (products + attention) / 1e12 + self.decode_tflop_per_megapixel * area / 1024**2


H200 = "one H200"
FLUX1, KLEIN_4B, KLEIN_9B = (57, 3072, 12, 10.5, H200), (25, 3072, 13, 10.5, H200), (32, 4096, 13, 10.5, H200)
# FLUX.1-dev, 1024x1024, 28 steps: 3.47 s an image fused, 2.34 in FP8. klein-4B, 4 steps: 0.250 and 0.174 (512x512:
# 0.075 and 0.050). klein-9B, 512x512: 35.4 and 20.7 ms a forward. The others have their relatives' rates.
COSTS = {
    "tiny": Cost(8, 192, 12, 0.3, "one CPU core", {"diffusers": 0.04, "fused": 0.04, "fp8": 0.04}),
    "tiny_flux2": Cost(11, 192, 13, 0.3, "one CPU core", {"diffusers": 0.04, "fused": 0.04, "fp8": 0.04}),
    "flux1_dev": Cost(*FLUX1, {"diffusers": 420, "fused": 603, "fp8": 894}),
    "flux1_schnell": Cost(*FLUX1, {"diffusers": 380, "fused": 603, "fp8": 894}),
    "flux2_klein_4b": Cost(*KLEIN_4B, {"diffusers": 240, "fused": 598, "fp8": 859}),
    "flux2_klein_base_4b": Cost(*KLEIN_4B, {"diffusers": 420, "fused": 598, "fp8": 859}),
    "flux2_klein_9b": Cost(*KLEIN_9B, {"diffusers": 320, "fused": 641, "fp8": 1097}),
    "flux2_klein_base_9b": Cost(*KLEIN_9B, {"diffusers": 440, "fused": 641, "fp8": 1097}),
}


def recipe(model: ModelConfig) -> str:
    """Which of a Cost's rates these settings reach on CUDA."""
    if model.quantization in ("fp8", "nvfp4"):
        return "fp8"
    return "diffusers" if model.kernels == "diffusers" or model.dtype == "float32" else "fused"


@dataclass(frozen=True, slots=True)
class Hours:
    """GPU hours, and the grounds: each with the share of the hours that rests on it."""

    gpu: Spread
    rests_on: dict[str, float]


def gpu_hours(work: Sequence[Work], cfg: JobConfig, known: Sequence[Known]) -> Hours | None:
    """Hours of one GPU, loading left out; None for a model that nothing is known of."""
    seconds_of = _Seconds(cfg, known)
    total, shares = NOTHING, dict[str, float]()
    for part in work:
        found = seconds_of(part.bucket)
        if found is None:
            return None
        seconds, ground = found
        hours = seconds * (part.launched / 3600)
        total += hours
        shares[ground] = shares.get(ground, 0.0) + hours.likely
    return Hours(total, {ground: hours / total.likely for ground, hours in shares.items() if total.likely})


def image_seconds(cfg: JobConfig, known: Sequence[Known]) -> Callable[[Bucket], float | None]:
    """What one launched image of a bucket is likely to take; None for a model that nothing is known of."""
    seconds_of = _Seconds(cfg, known)

    def image_s(bucket: Bucket) -> float | None:
        found = seconds_of(bucket)
        return found[0].likely if found else None

    return image_s


class _Seconds:
    """Answers what one launched image of a bucket takes, and what that rests on."""

    def __init__(self, cfg: JobConfig, known: Sequence[Known]) -> None:
        self._cost = COSTS.get(cfg.model.name)
        self._model = cfg.model
        self._step_cache = config.step_cache(cfg.sampler)
        self._known = {of.bucket: of for of in known}

    def __call__(self, bucket: Bucket) -> tuple[Spread, str] | None:
        if of := self._known.get(bucket):
            return Spread(*of.seconds), f"measured on {of.device} in {_runs(len(of.runs))}"
        if self._cost is None:
            return None
        tflop = self._tflop(bucket)
        if self._known:
            near = min(self._known.values(), key=lambda of: abs(self._tflop(of.bucket) - tflop))
            likely = near.seconds[1] * tflop / self._tflop(near.bucket)
            ground = f"measured on {near.device} for other shapes, scaled by FLOPs"
            return Spread(likely / SCALED_SPREAD, likely, likely * SCALED_SPREAD), ground
        rate = self._cost.tflop_per_s[recipe(self._model)]
        low, high = FLOP_MODEL_SPREAD
        ground = f"a FLOP model at {rate:g} TFLOP/s, seen on {self._cost.hardware}"
        return Spread(low * tflop / rate, tflop / rate, high * tflop / rate), ground

    def _tflop(self, bucket: Bucket) -> float:
        assert self._cost is not None
        text_tokens = self._model.max_sequence_length
        return self._cost.image_tflop(bucket, text_tokens=text_tokens, step_cache=self._step_cache)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def image_bytes(work: Sequence[Work], cfg: JobConfig, known: Sequence[Known], *, codec: str) -> tuple[Spread, str]:
    """Bytes of the images to be written, and what that rests on."""
    pixels = sum(part.rows * part.bucket.height * part.bucket.width for part in work)
    measured = bytes_per_pixel(known, codec)
    if measured:
        likely = sum(measured) / len(measured)
        low, high = min(measured) / MEASURED_BYTES_SPREAD, max(measured) * MEASURED_BYTES_SPREAD
        return Spread(low, likely, high) * pixels, f"measured in {_runs(len(measured))}"
    ruled = BYTES_PER_PIXEL[cfg.output.image_format]
    spread = Spread(ruled / CODEC_SPREAD, ruled, ruled * CODEC_SPREAD)
    return spread * pixels, f"a rule of thumb for {cfg.output.image_format}"


def pixel_bytes(pixels: int, image_format: str) -> tuple[int, int]:
    """Bytes of so many pixels: the least that pictures can take, and what photographs take."""
    return round(pixels * LEAST_BYTES_PER_PIXEL[image_format]), round(pixels * BYTES_PER_PIXEL[image_format])


@dataclass(frozen=True, slots=True)
class Weights:
    """GiB of bfloat16 weights as they are kept, counted from the models' own shapes (`models/residency.py`)."""

    transformer: float
    transformer_8_bit: float
    text_encoders: float
    streamed: float  # of them what leaves the GPU under model.residency=windowed, the two layers that stay left out
    vae: float = 0.16


FLUX1_WEIGHTS = Weights(22.17, 14.15, 9.10, 7.91)
KLEIN_4B_WEIGHTS = Weights(7.22, 3.79, 5.80, 4.70)
KLEIN_9B_WEIGHTS = Weights(16.91, 8.79, 10.86, 8.98)
WEIGHTS = {
    "flux1_dev": FLUX1_WEIGHTS,
    "flux1_schnell": FLUX1_WEIGHTS,
    "flux2_klein_4b": KLEIN_4B_WEIGHTS,
    "flux2_klein_base_4b": KLEIN_4B_WEIGHTS,
    "flux2_klein_9b": KLEIN_9B_WEIGHTS,
    "flux2_klein_base_9b": KLEIN_9B_WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB on the GPU at the peak, and what that rests on. `fits`: into the budget, where there is one to compare."""

    peak_gib: float
    weights_gib: float
    windowed: bool
    budget_gib: float | None
    rests_on: str

    @property
    def fits(self) -> bool | None:
        return None if self.budget_gib is None else self.peak_gib <= self.budget_gib


def memory(cfg: JobConfig, known: Sequence[Known], *, largest: Bucket | None) -> Memory | None:
    """Peak memory of a job whose largest images are these; None for a model that is small or unknown."""
    weights = WEIGHTS.get(cfg.model.name)
    if weights is None:
        return None
    budget = cfg.model.memory_budget_gib
    resident = _weights_gib(weights, cfg.model, windowed=False)
    tight = budget is not None and resident + WORKING_GIB > budget
    windowed = cfg.model.residency == "windowed" or (cfg.model.residency == "auto" and tight)
    held = _weights_gib(weights, cfg.model, windowed=windowed)
    peaks = [run.peak_gib for of in known if of.bucket == largest for run in of.runs if run.peak_gib is not None]
    if peaks and not windowed:
        return Memory(max(peaks), held, windowed, budget, f"measured on {known[0].device}")
    return Memory(held + WORKING_GIB, held, windowed, budget, f"the weights and {WORKING_GIB:g} GiB to work in")


def _weights_gib(weights: Weights, model: ModelConfig, *, windowed: bool) -> float:
    exact = weights.transformer * _widening(model.dtype)
    transformer = exact if model.quantization == "none" else weights.transformer_8_bit
    text = weights.text_encoders - (weights.streamed if windowed else 0.0)
    text_dtype, vae_dtype = model.text_encoder_dtype or model.dtype, model.vae_dtype or model.dtype
    return transformer + text * _widening(text_dtype) + weights.vae * _widening(vae_dtype)


def _widening(dtype: str) -> float:
    return 2.0 if dtype == "float32" else 1.0
