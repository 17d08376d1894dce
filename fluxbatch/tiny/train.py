"""Trains the embedded model further, from the shipped weights or a checkpoint; measures it, and packs the result.

    python -m fluxbatch.tiny.train --minutes 9.4 --runs-left 2 --out OUT
    python -m fluxbatch.tiny.train --minutes 9.4 --runs-left 1 --checkpoint OUT --out OUT2

Two stages: flow matching, then guidance distillation. A run that is not the last, or is stopped by SIGTERM, leaves
checkpoint.NN in --out; the last one leaves model.tar.NN, scores.json and grids. log.txt is written by all.
"""

import argparse
import copy
import functools
import io
import json
import math
import os
import signal
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch._dynamo
from diffusers import AutoencoderKL, FluxPipeline
from torch import Tensor

from fluxbatch.tiny import FOLDER
from fluxbatch.tiny import export as ex
from fluxbatch.tiny.data import (
    SHARES,
    SMOKE_SHARES,
    Captions,
    Share,
    Vae,
    fill_buckets,
    start_workers,
    token_ids,
    write_captions,
)
from fluxbatch.tiny.flow import Bucket, Net, distillation_loss, flow_loss, pad_t5
from fluxbatch.tiny.optim import Optimizer, Recorder, copy_of
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.vae import SIZES, SMOKE_SIZES, psnr, tune_decoder

DISTILL_SHARE = 0.15  # of the training time
AVERAGE_DECAY = 0.9995  # over about 2,000 steps: half a minute at the end of some 30,000
WARM_UP_STEPS = 300  # the moments start empty in each run
LOG_S = 5.0


@dataclass
class Clock:
    """This run's wall time; SIGTERM ends it at once."""

    minutes: float
    start: float = field(default_factory=time.monotonic)
    stopped: bool = False

    def left_s(self) -> float:
        return 0.0 if self.stopped else self.start + 60 * self.minutes - time.monotonic()

    def stop(self, *_: object) -> None:
        self.stopped = True


@dataclass
class State:
    """All that a later run needs. Optimiser moments are not kept: they fill again within the warm-up."""

    trained_s: float = 0.0
    steps: int = 0
    samples: int = 0
    stage: str = "flow"
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    teacher: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        buffer = io.BytesIO()
        halves = {
            name: {key: value.detach().half().cpu() for key, value in getattr(self, name).items()}
            for name in ("weights", "average", "teacher")
        }
        plain = {name: getattr(self, name) for name in ("trained_s", "steps", "samples", "stage")}
        torch.save(plain | halves, buffer)
        ex.save_pieces(buffer.getvalue(), folder, "checkpoint")

    @classmethod
    def load(cls, folder: Path | None) -> "State":
        content = ex.load_pieces(folder, "checkpoint") if folder else None
        return cls(**torch.load(io.BytesIO(content), weights_only=True)) if content else cls()


class Trainer:
    """Owns the network, its average, and the device's data; runs one stage after the other until time is up."""

    def __init__(self, args: argparse.Namespace, state: State, *, clock: Clock, say: Callable[[str], None]) -> None:
        self.args, self.state, self.clock, self.say = args, state, clock, say
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.net = self._net(state.weights)
        self.average = copy_of(self._net(state.average or state.weights).parameters())
        empty = (torch.from_numpy(ids).to(self.device).long() for ids in token_ids([""], FOLDER))
        clip_ids, t5_ids = empty
        self.empty = (clip_ids, pad_t5(t5_ids))
        self.steps_a_look = 25 if self.device.type == "cuda" else 4  # at the clock; each look waits for the device
        self.buckets: list[Bucket] = []
        self.loss_sum = torch.zeros((), device=self.device)

    def _net(self, weights: dict[str, Tensor]) -> Net:
        net = Net(FOLDER).to(self.device)
        if weights:
            net.load_state_dict(weights)
        return net.eval()  # nothing in it drops out

    def averaged(self) -> Net:
        net = self._net({})
        with torch.no_grad():
            torch._foreach_copy_(list(net.parameters()), self.average)
        return net

    def fill(self, shares: tuple[Share, ...], captions: Captions, textures: Tensor) -> None:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        vae = AutoencoderKL.from_pretrained(FOLDER / "vae", torch_dtype=dtype).to(self.device)
        vae = vae.to(memory_format=torch.channels_last)
        rotary = {(s.height, s.width): self.net.rotary(s.height, s.width) for s in shares}
        self.buckets = list(fill_buckets(shares, captions, vae=vae, textures=textures, rotary=rotary))

    def train(self, shares: tuple[Share, ...], *, reserve_s: float) -> None:
        """Both stages, as far as this run's share of the time goes."""
        if self.device.type == "cuda":
            self.net.compile_parts()
        end_s = self.state.trained_s + self.args.runs_left * max(1.0, self.clock.left_s() - reserve_s)
        flow_end_s = (1 - DISTILL_SHARE) * end_s
        if self.state.stage == "flow":
            loss = functools.partial(flow_loss, self.net, empty=self.empty)
            self._stage(shares, loss, start_s=0.0, end_s=flow_end_s, rate=self.args.lr, reserve_s=reserve_s)
            if self.state.trained_s < flow_end_s:
                return
            self._begin_distillation()
        teacher = self._net(self.state.teacher)
        if self.device.type == "cuda":
            teacher.compile_parts()
        loss = functools.partial(distillation_loss, self.net, empty=self.empty, teacher=teacher.requires_grad_(False))
        start_s = min(flow_end_s, self.state.trained_s)
        self._stage(shares, loss, start_s=start_s, end_s=end_s, rate=self.args.lr / 2, reserve_s=reserve_s)
        self.state.stage = "done" if self.state.trained_s >= end_s else "distillation"

    def _begin_distillation(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.net.parameters()), self.average)
        self.state.stage = "distillation"
        self.state.teacher = {name: value.clone() for name, value in self.net.state_dict().items()}

    def _stage(
        self,
        shares: tuple[Share, ...],
        loss: Callable[[Bucket], Tensor],
        *,
        start_s: float,
        end_s: float,
        rate: float,
        reserve_s: float,
    ) -> None:
        state, began_s, began = self.state, self.state.trained_s, time.monotonic()
        optimizer = Optimizer(self.net, self.average, average_decay=AVERAGE_DECAY)
        optimizer.learning_rate.fill_(rate / 100)
        recorder, steps = Recorder(self.say), []
        for bucket in self.buckets:
            steps.append(recorder.record(functools.partial(self._step, bucket, loss, optimizer)))
            self.say(f"{state.stage}: {bucket.height}x{bucket.width} ready, {time.monotonic() - began:.0f} s")
        weights = np.array([share.steps for share in shares]) / sum(share.steps for share in shares)
        order = np.random.default_rng(state.steps)
        done, logged, samples = 0, time.monotonic(), 0
        self.loss_sum.zero_()
        last_logged_step = 0
        while done == 0 or (state.trained_s < end_s and self.clock.left_s() > reserve_s):
            progress = (state.trained_s - start_s) / max(1e-9, end_s - start_s)
            optimizer.learning_rate.fill_(rate * min(1.0, (done + 1) / WARM_UP_STEPS) * _falling(progress))
            for _ in range(self.steps_a_look):
                choice = order.choice(len(steps), p=weights)
                steps[choice]()
                samples += self.buckets[choice].batch_size
            done += self.steps_a_look
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            state.trained_s = began_s + now - began
            if now - logged >= LOG_S or done == self.steps_a_look:
                mean = float(self.loss_sum) / (done - last_logged_step)
                self._log(mean, progress, samples / (now - logged), end_s)
                if not math.isfinite(mean):
                    raise SystemExit(f"{state.stage}: the loss is {mean} at step {state.steps + done}")
                self._refuse_crawling(samples / (now - logged), slow_start=done == self.steps_a_look)
                state.samples += samples
                self.loss_sum.zero_()
                logged, samples, last_logged_step = now, 0, done
        state.steps, state.samples = state.steps + done, state.samples + samples
        self.say(f"{state.stage}: {state.steps} steps, {state.samples / 1e6:.2f} M samples, {state.trained_s:.0f} s")

    def _step(self, bucket: Bucket, loss: Callable[[Bucket], Tensor], optimizer: Optimizer) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            value = loss(bucket)
        optimizer.step(value)
        self.loss_sum.add_(value.detach())

    def _log(self, loss: float, progress: float, rate: float, end_s: float) -> None:
        state = self.state
        self.say(
            f"{state.stage} {progress:6.1%}  loss {loss:.4f}  {rate:8.0f} samples/s  "
            f"trained {state.trained_s:.0f} of {end_s:.0f} s  this run {self.clock.left_s():.0f} s left"
        )

    def _refuse_crawling(self, rate: float, *, slow_start: bool) -> None:
        if rate < self.args.min_rate and not slow_start:
            raise SystemExit(f"{rate:.0f} samples/s is below --min-rate {self.args.min_rate:.0f}: not worth the lease")

    def keep(self) -> None:
        """Network and average into the state. T5's embedding has two names for one tensor."""
        self.state.weights = self.net.state_dict()
        average_of = {p.data_ptr(): a for p, a in zip(self.net.parameters(), self.average, strict=True)}
        self.state.average = {name: average_of[value.data_ptr()] for name, value in self.net.state_dict().items()}


def _falling(progress: float) -> float:
    """1 for the first third, then a cosine down to .01."""
    return max(0.01, 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, progress - 1 / 3) * 1.5)))


# ---------------------------------------------------------------- before and after


def load_compiled(folder: Path | None, say: Callable[[str], None]) -> None:
    """Kernels that an earlier run compiled on the same kind of machine."""
    path = folder / "compiled.bin" if folder else None
    if path and path.exists() and torch.cuda.is_available():
        torch.compiler.load_cache_artifacts(zlib.decompress(path.read_bytes()))
        say(f"compiled kernels loaded, {path.stat().st_size / 1e6:.1f} MB")


def save_compiled(folder: Path) -> None:
    artifacts = torch.compiler.save_cache_artifacts() if torch.cuda.is_available() else None
    if artifacts:
        content = zlib.compress(artifacts[0], 6)
        if len(content) <= ex.PIECE_BYTES:
            (folder / "compiled.bin").write_bytes(content)


def preview(trainer: Trainer, workers: Pool, out: Path, *, settings: tuple[ex.Setting, ...]) -> None:
    """What the undistilled average draws, at several scales of true classifier-free guidance."""
    vae = AutoencoderKL.from_pretrained(FOLDER / "vae").to(trainer.device)
    pipeline = ex.assemble(FOLDER, trainer.averaged(), vae)
    report = ex.examine(lambda _: pipeline, settings, workers, seconds=trainer.clock.left_s() - 8, say=trainer.say)
    (out / "scores.json").write_text(json.dumps(report, indent=1))
    shown = ex.SHOWN[:4] if trainer.args.smoke else ex.SHOWN
    ex.save_grid(out / "grid_128.png", ex.paint(pipeline, shown, settings[1]), columns=8)
    trainer.say("\n" + ex.table(report))


def finish(
    trainer: Trainer, workers: Pool, out: Path, *, captions: Captions, atlas: Atlas, args: argparse.Namespace
) -> None:
    """Tunes the decoder, writes and packs the model, then scores what was written."""
    clock, say, device = trainer.clock, trainer.say, trainer.device
    textures = atlas.textures.to(device)
    vae = AutoencoderKL.from_pretrained(FOLDER / "vae").to(device)
    if args.decoder_seconds > 0:
        sharpen(vae, captions, textures, trainer=trainer)
    folder = Path(tempfile.mkdtemp()) / "model"
    sizes = [(bucket.height, bucket.width) for bucket in trainer.buckets]
    size = ex.write_model(folder, source=FOLDER, net=trainer.averaged(), vae=vae, sizes=sizes)
    ex.pack_model(folder, out)
    say(f"model folder of {size / 1e6:.1f} MB packed")
    trainer.buckets.clear()
    pipelines = functools.cache(functools.partial(_pipeline, folder, device))
    grid(pipelines("float32"), out, args)
    num = 2 if args.smoke else 256
    report = ex.controls(pipelines("float32").vae, atlas, workers, num_prompts=num, size=(128, 128))
    settings = (ex.Setting(64, 64, num_inference_steps=2, num_prompts=1),) if args.smoke else ex.SETTINGS
    seconds = 20.0 if args.smoke else clock.left_s() - 10
    report = ex.examine(pipelines, settings, workers, seconds=seconds, say=say) | report
    (out / "scores.json").write_text(json.dumps(report, indent=1))
    say("\n" + ex.table(report))


def sharpen(vae: Vae, captions: Captions, textures: Tensor, *, trainer: Trainer) -> None:
    """Tunes the decoder; what made the round trip worse is undone."""
    args, clock = trainer.args, trainer.clock
    shipped, before = copy.deepcopy(vae.state_dict()), vae_psnr(vae, captions, textures)
    tune_decoder(
        vae,
        captions.rows.to(textures.device),
        textures,
        sizes=SMOKE_SIZES if args.smoke else SIZES,
        seconds=args.decoder_seconds,
        say=trainer.say,
        stopping=lambda: clock.left_s() < 60 and not args.smoke,
    )
    after = vae_psnr(vae, captions, textures)
    if after < before:
        vae.load_state_dict(shipped)
    trainer.say(
        f"VAE round trip {before:.2f} dB before, {after:.2f} dB after: {'kept' if after >= before else 'undone'}"
    )


def vae_psnr(vae: Vae, captions: Captions, textures: Tensor) -> float:
    return psnr(vae, render(captions.rows[-32:].to(textures.device), textures, height=128, width=128))


def _pipeline(folder: Path, device: torch.device, dtype: str) -> ex.Pipeline:
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=getattr(torch, dtype), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def grid(pipeline: ex.Pipeline, out: Path, args: argparse.Namespace) -> None:
    if args.smoke:
        small = ex.Setting(64, 64, num_inference_steps=2)
        ex.save_grid(out / "grid_128.png", ex.paint(pipeline, ex.SHOWN[:4], small), columns=4)
        return
    for height, width in ((128, 128), (256, 256), (192, 320)):
        name = "grid_128.png" if height == 128 else f"grid_{height}x{width}.png"
        ex.save_grid(out / name, ex.paint(pipeline, ex.SHOWN, ex.Setting(height, width), seed=3), columns=8)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="wall time of this run, everything included")
    parser.add_argument("--out", type=Path, required=True, help="folder for what the run leaves")
    parser.add_argument("--checkpoint", type=Path, help="--out of an earlier run, to go on from")
    parser.add_argument("--runs-left", type=int, default=1, help="runs of this length that the schedule spans")
    parser.add_argument("--reserve-s", type=float, default=None, help="seconds kept for measuring and packing")
    parser.add_argument("--decoder-seconds", type=float, default=0.0, help="seconds of decoder tuning in the last run")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min-rate", type=float, default=0.0, help="samples/s below which the run gives up")
    parser.add_argument("--smoke", action="store_true", help="the whole path on a CPU in a minute; draws nothing good")
    return parser.parse_args()


def _teller(path: Path, clock: Clock) -> Callable[[str], None]:
    log = path.open("a")

    def say(text: str) -> None:
        line = f"[{time.monotonic() - clock.start:6.1f} s] {text}"
        print(line, flush=True)
        print(line, file=log, flush=True)

    return say


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(args.minutes)
    say = _teller(args.out / "log.txt", clock)
    state = State.load(args.checkpoint)
    say(f"torch {torch.__version__}; at {state.stage}, {state.steps} steps, {state.trained_s:.0f} s trained")
    workers = start_workers()
    signal.signal(signal.SIGTERM, clock.stop)
    shares, atlas = SMOKE_SHARES if args.smoke else SHARES, Atlas()
    num = sum(share.num_samples for share in shares)
    captions = write_captions(workers, num, seed=1 + state.steps, index=atlas.index, folder=FOLDER)
    say(f"{num} captions written")
    _tune_backends(seed=state.steps)
    load_compiled(args.checkpoint, say)
    trainer = Trainer(args, state, clock=clock, say=say)
    trainer.fill(shares, captions, atlas.textures.to(trainer.device))
    say(f"latents: {sum(b.latents.nbytes for b in trainer.buckets) / 1e9:.2f} GB")
    last = args.runs_left == 1
    reserve_s = args.reserve_s if args.reserve_s is not None else (110 + args.decoder_seconds if last else 35)
    trainer.train(shares, reserve_s=reserve_s)
    trainer.keep()
    if state.stage != "done" and (not last or clock.stopped):
        state.save(args.out)
        save_compiled(args.out)
        say("checkpoint written")
        if not clock.stopped:
            preview(trainer, workers, args.out, settings=_smoke_previews() if args.smoke else ex.PREVIEWS)
    else:
        finish(trainer, workers, args.out, captions=captions, atlas=atlas, args=args)
    say("finished")
    workers.terminate()


def _smoke_previews() -> tuple[ex.Setting, ...]:
    return tuple(ex.Setting(64, 64, 2, 1.0, true_cfg_scale=scale, num_prompts=1) for scale in (1.0, 2.0))


def _tune_backends(*, seed: int) -> None:
    torch.manual_seed(seed)
    # cuDNN's attention backward fails at head_dim 32 on sm_90 (torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True  # a part that does not compile runs as it is
    torch._dynamo.config.recompile_limit = 64  # sizes x batches x with and without gradients


if __name__ == "__main__":
    main()
