"""Question: how fast are this model's matrix products, its attention, copies and image codecs by themselves?

python -m fluxbatch bench ceilings model=flux1_dev model.random_weights=true --size 1024x1024 --batch-size 4

No weight is loaded: the shapes follow from the transformer's settings. Every operand is random (constant data runs
faster than any real one: its bits do not toggle). FP8 is row-wise `torch._scaled_mm` on operands that are in FP8
already; quantising activations comes on top. Medians of 10 readings between CUDA events after a warm-up, each reading
long enough to hide its launch; `sustained` repeats the largest product for `--seconds`, which is what power allows.
The sums are the floor of one transformer pass, had everything between the products cost nothing. Excluded: norms,
modulation, embedders, the VAE. On a CPU the products are of one core and FP8 is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluxbatch.bench import jobs
from fluxbatch.bench.measure import GpuWatch, Limit, device_of, free_memory, synchronize, table, timed_ms
from fluxbatch.config import IMAGE_FORMATS, JobConfig, ModelConfig, OutputConfig
from fluxbatch.errors import first_line
from fluxbatch.models import homes, loading
from fluxbatch.pipeline.compress import compress
from fluxbatch.pipeline.prefetch import draw_noise
from fluxbatch.records import Bucket

FP8_MAX = 448.0  # of float8_e4m3fn
COPY_BYTES = 256 * 2**20
READING_MS = 5.0  # the shortest reading of a product
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Product:
    """(M, K) times (K, N), `count` times in one transformer pass."""

    name: str
    m: int
    k: int
    n: int
    count: int

    @property
    def flop(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class Shapes:
    """One transformer pass of a batch in numbers."""

    products: tuple[Product, ...]
    batch: int
    heads: int
    tokens: int  # text and image
    head_dim: int
    num_blocks: int


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser, sizes=False)
    parser.add_argument("--seconds", type=float, default=5, help="of each sustained product")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    limit, device = Limit(options.limit_s), device_of(cfg)
    bucket = jobs.bucket_of(cfg, options.size, options.steps)
    shapes = transformer_shapes(cfg.model, bucket, batch=jobs.batch_size(cfg, options))
    figures: dict[str, Any] = {"bucket": bucket.name, "batch_size": shapes.batch, "tokens": shapes.tokens}
    parts: dict[str, Callable[[], Any]] = {
        "codecs": lambda: _codecs(cfg.output, bucket),
        "copies": lambda: _copies(device),
        "products": lambda: _products(shapes, device),
        "attention": lambda: _attention(shapes, device),
        "sustained": lambda: _sustained(shapes, device, options.seconds),
    }
    for name, part in parts.items():
        if limit.over:
            break
        figures[name] = part()
        free_memory(device)
        yield figures
    if "attention" in figures:
        figures["floor_ms_per_pass"] = _floor(figures, shapes.num_blocks)
        print(f"floor of one pass, ms: {figures['floor_ms_per_pass']}")
        yield figures


# --- shapes -----------------------------------------------------------------------------------------------------------


def transformer_config(cfg: ModelConfig) -> dict[str, Any]:
    """The transformer's settings, from the built-in table or the model's folder; no weights."""
    if not cfg.random_weights:
        return homes.read_json(homes.model_folder(cfg) / "transformer" / "config.json")
    from fluxbatch.models import flux1, flux2

    return loading.random_config(flux1.RANDOM if cfg.family == "flux1" else flux2.RANDOM, cfg)["transformer"]


def transformer_shapes(cfg: ModelConfig, bucket: Bucket, *, batch: int) -> Shapes:
    """The block linears of one pass, queries, keys and values in one product. FLUX.2's feed-forward is gated."""
    settings = transformer_config(cfg)
    heads, head_dim = settings["num_attention_heads"], settings["attention_head_dim"]
    width, text = heads * head_dim, cfg.max_sequence_length
    image = bucket.height * bucket.width // cfg.size_multiple**2
    hidden = int(width * (4.0 if cfg.family == "flux1" else settings.get("mlp_ratio", 3.0)))
    gate = 1 if cfg.family == "flux1" else 2
    passes = 2 if bucket.negative_pass else 1
    rows, doubles, singles = batch * passes, settings["num_layers"], settings["num_single_layers"]
    streams = [("image", rows * image), ("text", rows * text)]
    products = [
        Product(f"{stream} {name}", tokens, k, n, doubles)
        for stream, tokens in streams
        for name, k, n in (("qkv", width, 3 * width), ("out", width, width), ("mlp in", width, gate * hidden),
                           ("mlp out", hidden, width))
    ]  # fmt: skip
    both = rows * (image + text)
    products += [
        Product("single qkv+mlp", both, width, 3 * width + gate * hidden, singles),
        Product("single out", both, width + hidden, width, singles),
    ]
    kept = tuple(product for product in products if product.count)
    return Shapes(kept, rows, heads, image + text, head_dim, doubles + singles)


# --- products ---------------------------------------------------------------------------------------------------------


def _products(shapes: Shapes, device: torch.device) -> list[dict[str, Any]]:
    columns = ("what", "M", "K", "N", "count", "bf16 ms", "bf16 TFLOP/s", "fp8 ms", "fp8 TFLOP/s")
    table(columns, [])
    rows = []
    for product in shapes.products:
        row: dict[str, Any] = {
            "what": product.name, "M": product.m, "K": product.k, "N": product.n, "count": product.count
        }  # fmt: skip
        for name, make in (("bf16", bf16_product), ("fp8", fp8_product)):
            row |= _timed_product(name, make, product, device)
        rows.append(row)
        table(columns, [row], header=False)
    return rows


def _timed_product(name: str, make: Callable[..., Any], product: Product, device: torch.device) -> dict[str, Any]:
    try:
        work = make(product, device)
        once_ms = timed_ms(work, device=device, repeats=3)
        ms = timed_ms(work, device=device, calls=max(1, int(READING_MS / once_ms)), warm_up=0)
    except (RuntimeError, ValueError) as error:
        return {f"{name} error": first_line(error)}
    return {f"{name} ms": round(ms, 4), f"{name} TFLOP/s": round(product.flop / ms / 1e9, 1)}


def bf16_product(product: Product, device: torch.device) -> Callable[[], Tensor]:
    a = torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16)
    weight = torch.randn(product.n, product.k, device=device, dtype=torch.bfloat16)
    return lambda: F.linear(a, weight)


def fp8_product(product: Product, device: torch.device) -> Callable[[], Tensor]:
    """Row-wise scales, output in bf16. Raises where the device has no FP8 products."""
    if device.type != "cuda":
        raise RuntimeError("FP8 products need a GPU")  # what torch raises for one that cannot do them
    a, scale_a = _fp8_rows(torch.randn(product.m, product.k, device=device, dtype=torch.bfloat16))
    weight, scale_w = _fp8_rows(torch.randn(product.n, product.k, device=device, dtype=torch.bfloat16))
    scales = {"scale_a": scale_a, "scale_b": scale_w.t()}
    return lambda: torch._scaled_mm(a, weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) to float8_e4m3fn and scales (M, 1): each row's largest value becomes the largest that FP8 holds."""
    scale = x.abs().amax(1, keepdim=True).float() / FP8_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _sustained(shapes: Shapes, device: torch.device, seconds: float) -> dict[str, Any]:
    """The largest product again and again: the rate that the power limit leaves."""
    largest = max(shapes.products, key=lambda product: product.flop)
    found: dict[str, Any] = {"what": largest.name}
    for name, make in (("bf16", bf16_product), ("fp8", fp8_product)):
        try:
            work = make(largest, device)
        except (RuntimeError, ValueError) as error:
            found[name] = {"error": first_line(error)}
            continue
        with GpuWatch(device) as watch:
            per_s = _calls_per_s(work, device, seconds)
        found[name] = {"TFLOP/s": round(per_s * largest.flop / 1e12, 1), "gpu": watch.figures()}
        print(f"sustained {name}, {largest.name}, {seconds:g} s: {found[name]}")
    return found


def _calls_per_s(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    work()
    synchronize(device)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            work()
        synchronize(device)
        calls += 20
    return calls / (time.perf_counter() - began)


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(shapes: Shapes, device: torch.device) -> list[dict[str, Any]]:
    columns = ("what", "batch", "heads", "tokens", "head_dim", "ms", "TFLOP/s", "error")
    table(columns, [])
    query, key, value = (
        torch.randn(shapes.batch, shapes.tokens, shapes.heads, shapes.head_dim, device=device, dtype=torch.bfloat16)
        .transpose(1, 2)
        for _ in range(3)
    )  # fmt: skip
    flop = 4 * shapes.batch * shapes.heads * shapes.tokens**2 * shapes.head_dim
    rows = []
    for name, backend in BACKENDS.items():
        row: dict[str, Any] = {"what": name, "batch": shapes.batch, "heads": shapes.heads,
                               "tokens": shapes.tokens, "head_dim": shapes.head_dim}  # fmt: skip
        try:
            with torch.inference_mode(), sdpa_kernel(backend):
                ms = timed_ms(lambda: F.scaled_dot_product_attention(query, key, value), device=device)
            row |= {"ms": round(ms, 4), "TFLOP/s": round(flop / ms / 1e9, 1)}
        except RuntimeError as error:  # no kernel for it here, or no memory
            row["error"] = first_line(error)
        rows.append(row)
        table(columns, [row], header=False)
    return rows


def _floor(figures: dict[str, Any], num_blocks: int) -> dict[str, float | None]:
    """Products and the fastest attention of one pass, ms; None where something of it could not be measured."""
    attention = [row["ms"] for row in figures["attention"] if "ms" in row]
    found: dict[str, float | None] = {}
    for name in ("bf16", "fp8"):
        products = [row.get(f"{name} ms") for row in figures["products"]]
        if not attention or None in products:
            found[name] = None
            continue
        total = sum(ms * row["count"] for ms, row in zip(products, figures["products"], strict=True))
        found[name] = round(total + num_blocks * min(attention), 2)
    return found


# --- copies and codecs ------------------------------------------------------------------------------------------------


def _copies(device: torch.device) -> dict[str, float]:
    """GB/s of 256 MiB of random bytes; a copy on the device reads and writes, and both count."""
    pinned = device.type == "cuda"
    host = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8)
    host = host.pin_memory() if pinned else host
    here = host.to(device, copy=True)
    other = torch.empty_like(here)
    found = {"device GB/s": _gb_per_s(lambda: other.copy_(here), device, 2 * COPY_BYTES)}
    if pinned:
        found["H2D GB/s"] = _gb_per_s(lambda: here.copy_(host, non_blocking=True), device, COPY_BYTES)
        found["D2H GB/s"] = _gb_per_s(lambda: host.copy_(here, non_blocking=True), device, COPY_BYTES)
    table(list(found), [found])
    return found


def _gb_per_s(work: Callable[[], Any], device: torch.device, num_bytes: int) -> float:
    return round(num_bytes / timed_ms(work, device=device) / 1e6, 1)


def _codecs(output: OutputConfig, bucket: Bucket) -> list[dict[str, Any]]:
    columns = ("what", "ms", "kB", "MPixel/s")
    table(columns, [])
    rows = [codec_figures(replace(output, image_format=name), bucket) for name in IMAGE_FORMATS]
    table(columns, rows, header=False)
    return rows


def codec_figures(output: OutputConfig, bucket: Bucket) -> dict[str, Any]:
    """One image on one core with this codec, as a job compresses it: milliseconds, kilobytes."""
    pixels, request = picture(bucket.height, bucket.width), jobs.request(0, bucket, guidance_scale=1.0)
    ms = timed_ms(lambda: compress(pixels, request, output), device=torch.device("cpu"), repeats=5, warm_up=1)
    return {
        "what": output.image_format, "ms": round(ms, 2), "kB": round(len(compress(pixels, request, output)) / 1e3),
        "MPixel/s": round(bucket.height * bucket.width / ms / 1e3, 1),
    }  # fmt: skip


def picture(height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8: smooth colour with grain of sigma 4, harder to compress than most pictures."""
    grain = torch.empty(height, width, 3)
    draw_noise(grain, seed=0)
    down, across = torch.linspace(0, 3, height)[:, None], torch.linspace(0, 4, width)
    smooth = torch.stack([(down * k + across).sin() for k in (1, 2, 3)], -1)
    return (128 + 90 * smooth + 4 * grain).round_().clamp_(0, 255).to(torch.uint8).numpy()
