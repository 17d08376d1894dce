"""Turn pixels into the bytes of an image file, the same bytes every time. Knows nothing of tensors or devices.

The codec is Pillow's; what else was tried stands in fluxbatch/bench/LOG.md.
"""

from __future__ import annotations

import io
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from PIL.ExifTags import IFD, Base
from PIL.PngImagePlugin import PngInfo

from fluxbatch.config import OutputConfig
from fluxbatch.pipeline.timing import BatchTimes
from fluxbatch.pipeline.transfer import HostBatch
from fluxbatch.records import Request, RowFailure, RowResult

USER_COMMENT_BYTES = 64_000  # a JPEG's EXIF segment holds 65,533 bytes, its own headers among them
Words = Mapping[str, str]  # what `parameters` says otherwise than for a FLUX model: its sampler
NO_WORDS: Words = MappingProxyType({})
PATIENCE_S = 0.5  # between two looks whether a codec is still worth waiting for


def compress(pixels: np.ndarray, request: Request, output: OutputConfig, *, sampler: str = "Euler") -> bytes:
    """(H, W, 3) uint8 to a PNG, JPEG or WebP file, with the row's settings inside where `embed_parameters` asks."""
    file = io.BytesIO()
    text = parameters(request, sampler=sampler) if output.embed_parameters else None
    Image.fromarray(pixels).save(file, output.image_format, **SAVE_OPTIONS[output.image_format](output, text))
    return file.getvalue()


def parameters(request: Request, *, sampler: str = "Euler") -> str:
    """The settings as AUTOMATIC1111's web UI writes them and as viewers read them. Size is width x height there."""
    lines = [request.prompt]
    if request.negative_prompt:
        lines.append(f"Negative prompt: {request.negative_prompt}")
    lines.append(
        f"Steps: {request.num_inference_steps}, Sampler: {sampler}, CFG scale: {request.guidance_scale}, "
        f"Seed: {request.seed}, Size: {request.width}x{request.height}"
    )
    return "\n".join(lines).replace("\0", " ")  # a PNG text chunk ends at a NUL


def _png(output: OutputConfig, text: str | None) -> dict[str, Any]:
    info = PngInfo()
    if text is not None:
        info.add_text("parameters", text)  # tEXt where Latin-1 can say it, else iTXt
    # Level 1 looks for runs only: on pictures of this kind as small as level 6 and as fast as level 1 (bench/LOG.md).
    strategy = zlib.Z_RLE if output.png_level == 1 else zlib.Z_DEFAULT_STRATEGY
    return {"compress_level": output.png_level, "compress_type": strategy, "pnginfo": info}


def _jpeg(output: OutputConfig, text: str | None) -> dict[str, Any]:
    return {"quality": output.quality, **_exif(text)}


def _webp(output: OutputConfig, text: str | None) -> dict[str, Any]:
    return {"quality": output.quality, **_exif(text)}


def _exif(text: str | None) -> dict[str, Any]:
    """EXIF's UserComment in UTF-16, cut to what a JPEG can hold; the whole prompt stands in its column."""
    if text is None:
        return {}
    encoded = text.encode("utf-16-be")[:USER_COMMENT_BYTES]
    whole = encoded.decode("utf-16-be", errors="ignore").encode("utf-16-be")
    exif = Image.Exif()
    exif.get_ifd(IFD.Exif)[Base.UserComment] = b"UNICODE\0" + whole
    return {"exif": exif}


SAVE_OPTIONS: dict[str, Callable[[OutputConfig, str | None], dict[str, Any]]] = {
    "png": _png,
    "jpeg": _jpeg,
    "webp": _webp,
}


@dataclass(frozen=True, slots=True)
class CompressedRow:
    result: RowResult
    start_s: float  # of the monotonic clock
    end_s: float


@dataclass(frozen=True, slots=True)
class CompressingBatch:
    """A batch whose rows are being compressed, in slot order."""

    host: HostBatch
    rows: tuple[Future[CompressedRow], ...]

    @property
    def times(self) -> BatchTimes:
        return self.host.times

    def collect(self, *, unless: Callable[[], bool] = lambda: False) -> list[CompressedRow]:
        """Wait for every row, in slot order. None at all where they are not there and `unless` is true."""
        start_s = time.perf_counter()
        with self.times.located("compress"):
            while wait(self.rows, timeout=PATIENCE_S).not_done:
                if unless():
                    return []
        rows = [row.result() for row in self.rows]
        self.times.add_wait_ms("compress->commit", (time.perf_counter() - start_s) * 1e3)
        return rows


def compress_row(host: HostBatch, row: int, output: OutputConfig, words: Words = NO_WORDS) -> CompressedRow:
    """One row's result. A codec that refuses fails this row alone. `words` are for the settings in its file."""
    start_s = time.perf_counter()
    request = host.batch.requests[row]
    failure, image = host.failures.get(row), None
    if failure is None:
        try:
            image = compress(host.pixels_BHWC[row], request, output, **words)
        except Exception as error:
            failure = RowFailure("compress", "codec_error", f"{type(error).__name__}: {error}")
    result = RowResult(id=request.id, image=image, truncated=host.truncated[row], failure=failure)
    return CompressedRow(result, start_s, time.perf_counter())


def submit(
    pool: Executor,
    host: HostBatch,
    output: OutputConfig,
    *,
    release: Callable[[], None],
    words: Words = NO_WORDS,
) -> CompressingBatch:
    """Start compressing every row; `release` is called after the last one, when nobody reads the pixels any more."""
    rows = tuple(pool.submit(compress_row, host, row, output, words) for row in range(len(host.batch.requests)))
    _after_all(rows, release)
    return CompressingBatch(host, rows)


def _after_all(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    unfinished = itertools.count(len(futures) - 1, -1)

    def count_down(_: Future[Any]) -> None:
        if next(unfinished) == 0:  # atomic, unlike -= 1
            then()

    for future in futures:
        future.add_done_callback(count_down)
