"""What a plan will cost: floating-point operations, hours and bytes, before anything is paid for. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from fluxbatch.config import JobConfig
from fluxbatch.plan import BucketRun, PlanPart

# Bytes a pixel, RGB. Photographs: medians of common test images; the codecs' own spread is a factor of two.
BYTES_PER_PIXEL = {"png": 1.5, "jpeg": 0.45, "webp": 0.35}
LEAST_BYTES_PER_PIXEL = {"png": 0.05, "jpeg": 0.02, "webp": 0.01}  # flat drawings; no photograph comes near


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOP counts of one architecture (1 multiply-add = 2 FLOP), and a rate it was seen to reach.

    S tokens cost 2 * macs_per_token * width^2 * blocks * S in matrix products, 4 * S^2 * width * blocks in attention.
    """

    blocks: int
    width: int
    macs_per_token: float  # of one block, in units of width^2
    latent_pixels: int  # side of one latent token in pixels
    decode_tflop_per_megapixel: float
    tflop_per_s: float  # measured, eager, end to end
    hardware: str

    def forward_tflop(self, tokens: int) -> float:
        products = 2 * self.macs_per_token * self.width**2 * self.blocks * tokens
        attention = 4 * tokens**2 * self.width * self.blocks
        return (products + attention) / 1e12


H200 = "one H200"
COSTS = {
    "tiny": Cost(8, 192, 12, 16, 0.3, 0.04, "one CPU core"),
    "flux1_dev": Cost(57, 3072, 12, 16, 10.5, 420, H200),
    "flux1_schnell": Cost(57, 3072, 12, 16, 10.5, 380, H200),
    "flux2_klein_4b": Cost(25, 3072, 13, 16, 10.5, 240, H200),
    "flux2_klein_base_4b": Cost(25, 3072, 13, 16, 10.5, 420, H200),
    "flux2_klein_9b": Cost(32, 4096, 13, 16, 10.5, 320, H200),
    "flux2_klein_base_9b": Cost(32, 4096, 13, 16, 10.5, 440, H200),
}


def image_bytes(part: PlanPart, cfg: JobConfig) -> int:
    """About how many bytes the images will take: a rule of thumb for photographs, no measurement of this job."""
    pixels = sum(run.num_rows * run.bucket.height * run.bucket.width for run in part.runs)
    return pixel_bytes(pixels, cfg.output.image_format)[1]


def pixel_bytes(pixels: int, image_format: str) -> tuple[int, int]:
    """Bytes of so many pixels: the least that pictures can take, and what photographs take."""
    return round(pixels * LEAST_BYTES_PER_PIXEL[image_format]), round(pixels * BYTES_PER_PIXEL[image_format])


def gpu_hours(part: PlanPart, cfg: JobConfig) -> float | None:
    """Hours on `COSTS[model].hardware` by a FLOP model, padding included; None for a model without a cost entry."""
    cost = COSTS.get(cfg.model.name)
    if cost is None:
        return None
    tflop = sum(_run_tflop(run, part, cost, cfg.model.max_sequence_length) for run in part.runs)
    return tflop / cost.tflop_per_s / 3600


def _run_tflop(run: BucketRun, part: PlanPart, cost: Cost, text_tokens: int) -> float:
    bucket = run.bucket
    area = bucket.height * bucket.width
    passes = bucket.num_inference_steps * (2 if bucket.negative_pass else 1)
    image = passes * cost.forward_tflop(area // cost.latent_pixels**2 + text_tokens)
    launched = -(-run.num_rows // run.batch_size) * run.batch_size
    return launched * (image + cost.decode_tflop_per_megapixel * area / 1024**2)
