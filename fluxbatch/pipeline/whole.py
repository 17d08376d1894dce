"""Draw one launch by a model that is a single call from text to pixels. Knows nothing of which pipeline that is.

The call is the denoise stage up to the VAE's decoder, its text encoders included, and the decode stage from there.
Legend: B rows of the launch, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from fluxbatch.models import Decode, WholeModel
from fluxbatch.pipeline.decode import launch_size, padded, unit_to_uint8
from fluxbatch.pipeline.timing import BatchTimes
from fluxbatch.pipeline.transfer import Drawn, finite_rows
from fluxbatch.records import Bucket, Request


class Watched:
    """What the call lets us see: its steps, and what goes into the VAE's decoder and comes out of it."""

    def __init__(
        self, to_stage: Callable[[str], None], before_step: Callable[[], None], *, max_decode_rows: int
    ) -> None:
        self.before_step = before_step
        self.finite: list[Tensor] = []  # (B,) of latents, then of pixels
        self._to_stage = to_stage
        self._max_decode_rows = max_decode_rows

    def decode(self, decode: Decode, latents: Tensor) -> Tensor:
        """All rows, in launches of one size; the last is padded with its last row."""
        self.finite.append(finite_rows(latents))
        self._to_stage("decode")
        rows = len(latents)
        size = launch_size(rows, max_rows=self._max_decode_rows)
        try:
            parts = [decode(padded(latents[first : first + size], size)) for first in range(0, rows, size)]
        except torch.OutOfMemoryError as error:  # which SanaPipeline would catch, and go on without an image
            raise MemoryError(str(error)) from None
        pixels = torch.cat(parts)[:rows]
        self.finite.append(finite_rows(pixels))
        return pixels


def draw_whole(
    model: WholeModel,
    requests: Sequence[Request],
    *,
    first_row: int,
    size: int,
    bucket: Bucket,
    times: BatchTimes,
    before_step: Callable[[], None],
    decode_max_pixels: int,
) -> Drawn:
    """Up to `size` rows; the launch has that size in any case, padded with its last row."""
    with ExitStack() as stage:

        def to_stage(name: str) -> None:
            stage.close()
            stage.enter_context(times.stage(name, on=model.device))

        # On a CPU row by row: its kernels cut a batch anywhere, and round differently near a cut.
        max_rows = 1 if model.device.type == "cpu" else max(1, decode_max_pixels // (bucket.height * bucket.width))
        seams = Watched(to_stage, before_step, max_decode_rows=max_rows)
        to_stage("denoise")
        rows = [*requests, *[requests[-1]] * (size - len(requests))]
        pixels_BCHW = model.draw(rows, bucket=bucket, seams=seams)
        if tuple(pixels_BCHW.shape) != (size, 3, bucket.height, bucket.width) or len(seams.finite) != 2:
            raise ValueError(
                f"the pipeline gave images {tuple(pixels_BCHW.shape)} for {size} rows of "
                f"{bucket.height}x{bucket.width}, with {len(seams.finite) // 2} calls of its decoder"
            )
        latents_finite, pixels_finite = seams.finite
        finite_B3 = torch.stack([torch.ones_like(latents_finite), latents_finite, pixels_finite], dim=1)
        levels_BHWC = unit_to_uint8(pixels_BCHW)
    number = len(requests)
    dtypes = (model.dtype, model.dtype, model.vae_dtype)
    return Drawn(first_row, levels_BHWC[:number], finite_B3[:number], dtypes)
