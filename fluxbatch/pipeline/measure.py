"""Time launches of one shape on the device, as the pipeline would make them. Knows nothing of plans or of what is done
with the figures. Legend: B rows, L packed latent tokens, C channels."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fluxbatch.config import ModelConfig, PipelineConfig
from fluxbatch.models import Model, PromptEmbeds, memory
from fluxbatch.pipeline.decode import decode, launch_size
from fluxbatch.pipeline.denoise import denoise
from fluxbatch.pipeline.device import cuda_index, is_out_of_memory
from fluxbatch.records import Bucket, LaunchCost

log = logging.getLogger(__name__)

STEPS = 3
WARM_UP_S = 1.0  # a GPU that was idle is up to 12 % faster for a moment than at its power limit
TIMED_S = 1.0


class LaunchMeter:
    """Owns what launches need beside latents: embeddings of one encoder launch, and room for what a run keeps."""

    @torch.inference_mode()
    def __init__(
        self, model: Model, *, model_cfg: ModelConfig, pipeline: PipelineConfig, check: Callable[[], None]
    ) -> None:
        """`check` is called before every step and may raise to stop early."""
        self._model = model
        self._device_index = cuda_index(model.device)
        self._check = check
        self._decode_max_pixels = model_cfg.decode_max_pixels
        prompts = [f"a lighthouse in the evening, number {index}" for index in range(model_cfg.encode_batch_size)]
        tokens = model.tokenize(prompts).tensors
        with torch.cuda.device(self._device_index):
            self._embeds = model.encode({name: ids.to(model.device) for name, ids in tokens.items()})
        prompt_bytes = sum(tensor[0].nbytes for tensor in self._embeds.values())
        self._kept_bytes = pipeline.prompt_cache * prompt_bytes
        self._copies = pipeline.depth + 1  # of noise and pixels, on their way in and out

    @torch.inference_mode()
    def __call__(self, bucket: Bucket, size: int) -> LaunchCost | None:
        """What a launch of `size` rows of the bucket's shape costs; None where it does not fit into memory."""
        try:
            with torch.cuda.device(self._device_index):  # kernels go to the current device, which is 0 in this thread
                return self._cost(replace(bucket, num_inference_steps=STEPS), size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            log.info("%dx%d: %d images do not fit", bucket.height, bucket.width, size)
        finally:
            self._give_back()  # outside the handler: its exception's frames hold every tensor of the attempt
        return None

    def _cost(self, bucket: Bucket, size: int) -> LaunchCost:
        device = self._model.device
        memory.reset_peak(device)
        shape = (size, *self._model.noise_shape(height=bucket.height, width=bucket.width))
        noise = torch.randn(shape, device=device)
        image_bytes = noise.nbytes + size * bucket.height * bucket.width * 3
        kept = torch.empty(self._kept_bytes + self._copies * image_bytes, dtype=torch.uint8, device=device)
        latents = self._denoise(noise, bucket)
        self._fit_decode(latents, bucket)
        step_s = self._seconds(lambda: self._denoise(noise, bucket)) / STEPS
        decode_s = self._seconds(lambda: self._decode(latents, bucket))
        _, reserved_gib = memory.peak_gib(device) or (0.0, 0.0)
        del kept
        return LaunchCost(size, step_s, decode_s, reserved_gib)

    def _denoise(self, noise: Tensor, bucket: Bucket) -> Tensor:
        embeds = self._repeated(len(noise))
        return denoise(
            self._model,
            noise,
            embeds=embeds,
            negative_embeds=embeds if bucket.negative_pass else None,
            guidance=torch.full((len(noise),), 3.5, device=noise.device),
            bucket=bucket,
            before_step=self._check,
        )

    def _repeated(self, size: int) -> PromptEmbeds:
        rows = torch.arange(size, device=self._model.device) % len(next(iter(self._embeds.values())))
        return {name: tensor[rows] for name, tensor in self._embeds.items()}

    def _decode(self, latents: Tensor, bucket: Bucket) -> Tensor:
        return decode(self._model, latents, bucket=bucket, max_pixels=self._decode_max_pixels)[0]

    def _fit_decode(self, latents: Tensor, bucket: Bucket) -> None:
        """Halve the decoder's launch until it fits, as the pipeline does; one image that does not fit raises."""
        area = bucket.height * bucket.width
        while True:
            try:
                self._decode(latents, bucket)
                return
            except (RuntimeError, MemoryError) as error:
                rows = launch_size(len(latents), max_rows=max(1, self._decode_max_pixels // area))
                if rows == 1 or not is_out_of_memory(error):
                    raise
                self._decode_max_pixels = rows // 2 * area
            self._give_back()

    def _seconds(self, work: Callable[[], Tensor]) -> float:
        """Of one repetition, at the clocks of a device that has been busy for a while."""
        self._repeat(work, at_least_s=WARM_UP_S)
        return self._repeat(work, at_least_s=TIMED_S)

    def _repeat(self, work: Callable[[], Tensor], *, at_least_s: float) -> float:
        start_s, count = time.perf_counter(), 0
        while True:
            work()
            count += 1
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
            elapsed_s = time.perf_counter() - start_s
            if elapsed_s >= at_least_s:
                return elapsed_s / count

    def _give_back(self) -> None:
        gc.collect()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
