"""Question: how fast is fluxbatch beside what its users could run instead, images on disk, in one process, in turns?

python -m fluxbatch bench peers model=flux1_dev model.random_weights=true --size 1024x1024 --batch-size 4 --seconds 60

  loop           the diffusers pipeline in a loop, batch 1, default attention, PNG saved
  lossless       the same with fused QKV, cuDNN attention on Hopper, compiled blocks, channels-last compiled VAE
  torchao_fp8    lossless, with torchao's dynamic row-wise FP8 in the blocks (quantised)
  cache_dit      lossless, with cache-dit's block cache under its fixed "medium" step mask (lossy)
  fluxbatch      the real job: manifest in, shards and report on disk, with the settings given here
  fluxbatch_fp8  the same with model.quantization=fp8 (quantised)

Everybody encodes its prompts, decodes, compresses PNG and writes to the same disk. Contestants draw in turns, forward
then backward (`--rounds 2`: ABBA), for `--seconds` each in all. diffusers' contestants share weights; fluxbatch loads
its own, as a run does. Warm-up of each: every shape at up to 4 steps, with whatever is compiled then (reported).
Excluded: loading, compiling and warming up; of fluxbatch also the first batch of each job, which fills the pipeline.
Peak memory is a contestant's own: its weights, shared ones too, and what it adds to them while it draws.

`--mixed ROWS` draws a manifest of 6 shapes and 2 step counts instead. fluxbatch's time is then that of its whole job,
nothing left out but loading; a loop draws as many of the same rows as its seconds allow, shape by shape in turn, and
is charged each bucket's mean for the rest (`images` says how many it drew; without one of each: no figure).
A contestant that fails is reported and the others go on; `--limit-s` ends with what was measured.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fluxbatch.bench import jobs, recipes
from fluxbatch.bench.contestants import Cell, Contestant, DiffusersLoop, Fluxbatch, Shelf, Turn
from fluxbatch.bench.measure import GIB, GpuWatch, Limit, device_of, free_memory, reset_peak, table
from fluxbatch.config import DTYPES, JobConfig
from fluxbatch.errors import ConfigError, Interrupted

log = logging.getLogger(__name__)

NAMES = ("loop", "lossless", "torchao_fp8", "cache_dit", "fluxbatch", "fluxbatch_fp8")
DEFAULT = "loop,lossless,torchao_fp8,fluxbatch,fluxbatch_fp8"
RECOMPILE_LIMIT = 256  # every contestant and shape compiles the same code once more
TURN_COLUMNS = ("name", "round", "images", "s/image", "busy %", "W", "MHz", "C")
COLUMNS = ("name", "kind", "images", "s/image", "x loop", "x lossless", "build s", "warm-up s", "peak GiB", "W", "MHz")


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser, sizes=False)
    parser.add_argument("--seconds", type=float, default=60, help="of steady state, each contestant, all rounds")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contestant")
    parser.add_argument("--alone", action="store_true", help="each takes all its turns, then is freed: saves memory")
    parser.add_argument("--peers", default=DEFAULT, help=f"any of {','.join(NAMES)}")
    parser.add_argument("--mixed", type=int, metavar="ROWS", help="a manifest of 6 shapes and 2 step counts")
    parser.add_argument("--baseline-dtype", choices=DTYPES, help="of `loop` alone; default: model.dtype")
    parser.add_argument("--inductor-flags", action="store_true", help="torchao_fp8 with flux-fast's: slow to compile")
    parser.add_argument("--folder", type=Path, help="where images go; default: a temporary folder")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    limit, cell, shelf = Limit(options.limit_s), _cell(cfg, options), Shelf()
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    with jobs.scratch(options.folder) as folder:
        seats = [Seat(contestant, cell) for contestant in _contestants(cell, options, shelf, folder)]
        contestants: dict[str, dict[str, Any]] = {}
        batch_sizes = {bucket.name: cell.batch_size(bucket) for bucket in cell.buckets}
        figures = {"batch_sizes": batch_sizes, "contestants": contestants}
        table(TURN_COLUMNS, [])
        try:
            for seat, number in _order(seats, options.rounds, alone=options.alone):
                if not limit.over:
                    seat.sit(number, options.seconds / options.rounds, limit)
                contestants[seat.name] = seat.figures()
                yield figures
                if options.alone and number == options.rounds - 1:
                    shelf.clear()
                    seat.close()
        finally:
            for seat in seats:
                seat.close()
    compare(contestants)
    print()
    table(COLUMNS, [_row(name, found) for name, found in contestants.items()])
    for name, found in contestants.items():
        if "error" in found:
            print(f"{name}: {found['error']}")
    yield {**figures, "ok": any("s_per_image" in found for found in contestants.values())}


def _order(seats: list[Seat], rounds: int, *, alone: bool) -> list[tuple[Seat, int]]:
    """Who draws when, in which of his turns: forward, backward, ...; `alone`: all turns of one, then of the next."""
    if alone:
        return [(seat, number) for seat in seats for number in range(rounds)]
    return [(seat, number) for number in range(rounds) for seat in (seats if number % 2 == 0 else seats[::-1])]


def _cell(cfg: JobConfig, options: argparse.Namespace) -> Cell:
    """A mixed manifest keeps plan.batch_size=auto: each of its shapes has a size of its own."""
    bucket = jobs.bucket_of(cfg, options.size, options.steps)
    if options.mixed and options.batch_size is None:
        return Cell.mixed(cfg, bucket, options.mixed)
    sized = jobs.with_batch_size(cfg, jobs.batch_size(cfg, options))
    return Cell.mixed(sized, bucket, options.mixed) if options.mixed else Cell.uniform(sized, bucket)


def _contestants(cell: Cell, options: argparse.Namespace, shelf: Shelf, folder: Path) -> list[Contestant]:
    wanted = options.peers.split(",")
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ConfigError(f"bench peers: --peers must be of {', '.join(NAMES)}, got {unknown[0]!r}")
    loop = partial(DiffusersLoop, cell=cell, shelf=shelf, folder=folder)
    steps = max(bucket.num_inference_steps for bucket in cell.buckets)
    made: dict[str, Contestant] = {
        "loop": loop("loop", "lossless", dtype=options.baseline_dtype),
        "lossless": loop("lossless", "lossless", recipe=recipes.lossless),
        "torchao_fp8": loop(
            "torchao_fp8", "quantised", recipe=recipes.torchao_fp8, needs=["fp8", "torchao"],
            compiling=_inductor_flags if options.inductor_flags else nullcontext,
        ),
        "cache_dit": loop(
            "cache_dit", "cached", recipe=partial(recipes.cached_steps, num_inference_steps=steps), needs=["cache_dit"]
        ),
        "fluxbatch": Fluxbatch("fluxbatch", "lossless", cell, folder, alone=options.alone),
        "fluxbatch_fp8": Fluxbatch(
            "fluxbatch_fp8", "quantised", cell, folder, quantization="fp8", alone=options.alone
        ),
    }  # fmt: skip
    return [made[name] for name in wanted]


def _inductor_flags() -> AbstractContextManager[Any]:
    import torch._inductor.config as inductor

    return inductor.patch(recipes.INDUCTOR_FLAGS)


class Seat:
    """Owns one contestant's part in the game: its state, its turns and its memory; an error ends its part alone."""

    def __init__(self, contestant: Contestant, cell: Cell) -> None:
        self.name = contestant.name
        self._contestant, self._cell = contestant, cell
        self._device = device_of(cell.cfg)
        self._found: dict[str, Any] = {"kind": contestant.kind, "turns": []}
        self._turns: list[Turn] = []
        self._is_built = False
        self._resident = self._kept = self._added = 0  # bytes: weights; left by the warm-up; on top while drawing

    def sit(self, number: int, seconds: float, limit: Limit) -> None:
        """Build and warm up where that is still to be done, then take a turn."""
        if "error" in self._found:
            return
        try:
            self._prepare()
            if not limit.over:
                self._take_turn(number, seconds, limit)
        except Interrupted:
            raise
        except Exception as error:
            self._fail(error)
        free_memory(self._device)

    def _fail(self, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0]
        self._found["error"] = reason if isinstance(error, ConfigError) else f"{type(error).__name__}: {reason}"
        log.warning("%s takes no further part", self.name, exc_info=not isinstance(error, ConfigError))
        print(f"{self.name}: {self._found['error']}", flush=True)
        error.__traceback__ = None  # its frames hold tensors
        self.close()

    def _prepare(self) -> None:
        if self._is_built:
            return
        missing = self._contestant.missing()
        if missing:
            raise ConfigError(missing)
        free_memory(self._device)
        before = self._allocated()
        self._found["build_s"] = self._timed(self._contestant.build)
        self._found["build_peak_gib"] = self._gib(self._peak() - before)
        built = self._allocated()
        self._resident = self._contestant.resident_bytes() or built - before
        self._found["warm_up_s"] = self._timed(self._contestant.warm_up)
        self._added, self._kept = self._peak() - built, max(0, self._allocated() - built)
        self._is_built = True

    def _take_turn(self, number: int, seconds: float, limit: Limit) -> None:
        before = self._allocated()
        self._forget_peak()
        with GpuWatch(self._device) as watch:
            turn = self._contestant.turn(seconds, limit)
        self._added = max(self._added, self._kept + self._peak() - before)
        self._turns.append(turn)
        images, drawn_s = sum(turn.images.values()), sum(turn.seconds.values())
        told = {"round": number, "images": images, "seconds": round(drawn_s, 3),
                "s_per_image": round(drawn_s / max(1, images), 5), "gpu": watch.figures(), **turn.detail}  # fmt: skip
        self._found["turns"].append(told)
        gpu = told["gpu"]
        row = {"name": self.name, "round": number, "images": images, "s/image": told["s_per_image"],
               "busy %": gpu["busy_percent"], "W": gpu["power_w"], "MHz": gpu["sm_clock_mhz"],
               "C": gpu["temperature_c"]}  # fmt: skip
        table(TURN_COLUMNS, [row], header=False)

    def figures(self) -> dict[str, Any]:
        """All that is known so far."""
        drawn = sum(sum(turn.images.values()) for turn in self._turns)
        s_per_image = seconds_per_image(self._turns, self._cell) if drawn else None
        known = {"images": drawn, "peak_gib": self._gib(self._resident + self._added)}
        return self._found | known | ({} if s_per_image is None else {"s_per_image": round(s_per_image, 5)})

    def close(self) -> None:
        self._contestant.close()
        free_memory(self._device)

    def _timed(self, work: Any) -> float:
        self._forget_peak()
        began = time.perf_counter()
        work()
        return round(time.perf_counter() - began, 1)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _forget_peak(self) -> None:
        reset_peak(self._device)
        self._contestant.peak_bytes = 0

    def _peak(self) -> int:
        """Since it was forgotten."""
        now = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return max(now, self._contestant.peak_bytes)

    def _gib(self, num_bytes: int) -> float | None:
        return round(num_bytes / GIB, 2) if self._device.type == "cuda" else None


def seconds_per_image(turns: list[Turn], cell: Cell) -> float | None:
    """Of all turns; of a mixed manifest that was drawn in part, each bucket's mean weighted by its rows."""
    images: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for turn in turns:
        for bucket in turn.images:
            images[bucket] = images.get(bucket, 0) + turn.images[bucket]
            seconds[bucket] = seconds.get(bucket, 0.0) + turn.seconds[bucket]
    if not cell.rows or "" in images:  # one bucket, or whole manifests
        return sum(seconds.values()) / sum(images.values())
    rows = [replace(bucket, negative_pass=False).name for bucket in cell.buckets]
    wanted = [rows[number % len(rows)] for number in range(len(cell.rows))]
    if not set(wanted) <= set(images):
        return None
    return sum(seconds[name] / images[name] for name in wanted) / len(wanted)


def compare(contestants: dict[str, dict[str, Any]]) -> None:
    """How many times as fast as the loop, the lossless recipe and torchao's FP8 each one is."""
    for reference in ("loop", "lossless", "torchao_fp8"):
        base = contestants.get(reference, {}).get("s_per_image")
        for found in contestants.values():
            if base and found.get("s_per_image"):
                found[f"times_{reference}"] = round(base / found["s_per_image"], 3)


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    gpu = found["turns"][-1]["gpu"] if found["turns"] else {}
    return {
        "name": name, "kind": found["kind"], "images": found["images"], "s/image": found.get("s_per_image"),
        "x loop": found.get("times_loop"), "x lossless": found.get("times_lossless"),
        "build s": found.get("build_s"), "warm-up s": found.get("warm_up_s"), "peak GiB": found["peak_gib"],
        "W": gpu.get("power_w"), "MHz": gpu.get("sm_clock_mhz"),
    }  # fmt: skip
