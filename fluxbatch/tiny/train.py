"""Trains an embedded model, measures it, and packs the result for a way home of a few small files.

    python -m fluxbatch.tiny.train --minutes 8 --out OUT                  # the shipped FLUX.1 further
    python -m fluxbatch.tiny.train --minutes 8 --from OUT --out OUT2      # further from that run's checkpoint
    python -m fluxbatch.tiny.train --minutes 30 --from nothing --out OUT  # VAE, text encoders and transformer anew
    python -m fluxbatch.tiny.train --minutes 8 --model flux2 --from vae --out OUT   # a FLUX.2 around the shipped VAE

The artwork comes with the repository (sprites.npz; make_sprites.py made it), so no network is needed. In OUT, as the
run goes on: log.txt, run.json (losses, throughput, scores with their controls), checkpoint.NN, then model.tar.NN and
sheet.png. `python -m fluxbatch.tiny.install OUT` puts the model in its place.
"""

import argparse
import copy
import functools
import json
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from fluxbatch.tiny import examine as ex
from fluxbatch.tiny.checkpoint import Checkpoint, vae_numbers
from fluxbatch.tiny.data import SHARES, SMOKE_SHARES, Captions, fill_buckets, start_workers, write_captions
from fluxbatch.tiny.examination import examination
from fluxbatch.tiny.export import pack_model, write_model
from fluxbatch.tiny.flux1 import Flux1
from fluxbatch.tiny.flux2 import Flux2
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.trainer import Clock, Progress, Trainer
from fluxbatch.tiny.vae import (
    SIZES,
    SMOKE_SIZES,
    Pictures,
    Vae,
    calibrate,
    encode_pixels,
    psnr,
    train_decoder,
    train_whole,
)

FAMILIES: dict[str, Any] = {"flux1": Flux1, "flux2": Flux2}
VAE_SHARE, DISTILL_SHARE = 0.2, 0.12  # of the training time, where there is such a stage
END_S = 8.0  # kept for what workers still judge, and for leaving


@dataclass
class Run:
    """This run's folder: its log, and a record that is written again whenever something is known."""

    out: Path
    clock: Clock
    progress: Progress
    record: dict[str, Any]
    scores: dict[str, ex.Scores] = field(default_factory=dict)

    def say(self, text: str) -> None:
        line = f"[{self.clock.spent_s():6.1f} s] {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a") as log:
            print(line, file=log)

    def write(self) -> None:
        known = self.record | vars(self.progress) | {"scores": self.scores}
        aside = self.out / ".run.json"
        aside.write_text(json.dumps(known, indent=1))
        aside.replace(self.out / "run.json")

    def found(self, name: str, scores: ex.Scores) -> None:
        self.scores[name] = scores
        self.write()
        self.say(f"{name}: " + ", ".join(f"{kind} {share:.3f}" for kind, share in ex.headlines(scores).items()))


@dataclass(frozen=True)
class Begun:
    """What a run begins with: a folder of configurations and tokenizers, network and VAE."""

    template: Path
    net: Any
    vae: Vae
    vae_is_trained: bool


def begin(family: Any, source: str, *, work: Path, progress: Progress) -> Begun:
    if source == "shipped":
        if not family.folder.is_dir():
            raise SystemExit(f"--from shipped: there are no weights of {family.name} yet; use --from vae or nothing")
        return Begun(family.folder, family.load(family.folder), family.load_vae(family.folder), True)
    template = family.template(work)
    if source in ("vae", "nothing"):
        vae = family.shipped_vae() if source == "vae" else family.fresh_vae(template)
        return Begun(template, family.fresh(template), vae, source == "vae")
    checkpoint = Checkpoint.load(Path(source))
    if checkpoint.model != family.name:
        raise SystemExit(f"--from {source} is a checkpoint of {checkpoint.model}, not of {family.name}")
    net, vae = family.fresh(template), family.fresh_vae(template)
    net.load_state_dict(checkpoint.network)
    vae.load_state_dict(checkpoint.vae)
    vae.register_to_config(**checkpoint.vae_numbers)
    progress.steps, progress.samples, progress.trained_s = checkpoint.steps, checkpoint.samples, checkpoint.trained_s
    return Begun(template, net, vae, True)


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.out, Clock(args.minutes), Progress(), {"arguments": {k: str(v) for k, v in vars(args).items()}})
    workers, atlas = start_workers(), Atlas()  # forked before CUDA is touched
    signal.signal(signal.SIGTERM, run.clock.stop)
    family, shares = FAMILIES[args.model], SMOKE_SHARES if args.smoke else SHARES
    with tempfile.TemporaryDirectory() as work:
        begun = begin(family, args.source, work=Path(work), progress=run.progress)
        _tune_backends(seed=1 + run.progress.steps)
        num, tokenise = sum(share.num_samples for share in shares), family.tokenise(begun.template)
        writing = write_captions(workers, num, seed=1 + run.progress.steps, index=atlas.index, tokenise=tokenise)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        net, vae, textures = begun.net.to(device).eval(), begun.vae.to(device), atlas.textures.to(device)
        run.record |= {"model": family.name, "torch": torch.__version__, "device": name}
        run.say(f"{family.name} from {args.source}: {_count(net)} and a VAE of {_count(vae)} parameters, on {name}")
        captions = writing.result()
        run.say(f"{num} captions written")
        ready_vae(run, vae, captions, textures, trained=begun.vae_is_trained, args=args)
        train(run, net, vae, template=begun.template, captions=captions, textures=textures, args=args)
        finish(run, net, vae, template=begun.template, workers=workers, atlas=atlas, args=args)
    run.say("finished")
    workers.terminate()


def ready_vae(
    run: Run, vae: Vae, captions: Captions, textures: Tensor, *, trained: bool, args: argparse.Namespace
) -> None:
    """Trains the VAE where it is new, its decoder where that is asked for, and measures its latents."""
    sizes = SMOKE_SIZES if args.smoke else SIZES
    if not trained:
        pictures = [Pictures(size, captions.rows, textures) for size in sizes]
        train_whole(vae, pictures, seconds=VAE_SHARE * (run.clock.left_s() - args.reserve_s), say=run.say)
    if args.decoder_seconds > 0:
        pictures = [Pictures(size, captions.rows, textures) for size in sizes]
        train_decoder(vae, pictures, seconds=args.decoder_seconds, say=run.say)
    if not trained or args.source == "vae":
        rows = captions.rows[: 16 if args.smoke else 1024].to(textures.device)
        shown = render(rows, textures, height=128, width=128)
        with torch.no_grad():
            calibrate(vae, torch.cat([encode_pixels(vae, part) for part in shown.split(64)]))
    shown = render(captions.rows[-16:].to(textures.device), textures, height=128, width=128)
    run.say(f"VAE round trip {psnr(vae, shown):.1f} dB")


def train(
    run: Run, net: Any, vae: Vae, *, template: Path, captions: Captions, textures: Tensor, args: argparse.Namespace
) -> None:
    """Flow matching, a checkpoint, then distillation where the family has guidance. Leaves the average in `net`."""
    shares, clock, device = SMOKE_SHARES if args.smoke else SHARES, run.clock, textures.device
    rotary = {(share.height, share.width): net.rotary(share.height, share.width) for share in shares}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    encoder = copy.deepcopy(vae).to(dtype=dtype, memory_format=torch.channels_last)
    buckets = list(fill_buckets(shares, captions, vae=encoder, textures=textures, rotary=rotary))
    run.say(f"latents: {sum(bucket.latents.nbytes for bucket in buckets) / 1e9:.2f} GB")

    def keep(average: dict[str, Tensor]) -> None:
        done = run.progress
        parts = (net.name, average, vae.state_dict(), vae_numbers(vae), done.steps, done.samples, done.trained_s)
        Checkpoint(*parts).save(run.out)
        run.write()

    trainer = Trainer(net, progress=run.progress, clock=clock, say=run.say, keep=keep)
    empty = tuple(torch.from_numpy(ids).to(device).long() for ids in net.tokenise(template)([""]))
    distill_s = DISTILL_SHARE * (clock.left_s() - args.reserve_s) if net.guided else 0.0
    trainer.match_flow(buckets, shares, empty=empty, rate=args.lr, until_left_s=args.reserve_s + distill_s)
    keep(trainer.averaged())
    run.say("checkpoint written")
    if net.guided and not clock.stopped:
        teacher = type(net).fresh(template).to(device).eval().requires_grad_(False)
        teacher.load_state_dict(trainer.averaged())
        trainer.distil(buckets, shares, empty=empty, teacher=teacher, rate=args.lr, until_left_s=args.reserve_s)
    trainer.use_average()
    run.write()


def finish(
    run: Run, net: Any, vae: Vae, *, template: Path, workers: Pool, atlas: Atlas, args: argparse.Namespace
) -> None:
    """Writes and packs the model, then draws and scores with what was written."""
    device, shares = vae.device, SMOKE_SHARES if args.smoke else SHARES
    folder = Path(tempfile.mkdtemp()) / "model"
    sizes = [(share.height, share.width) for share in shares]
    run.record["model_bytes"] = write_model(folder, source=template, net=net, vae=vae, sizes=sizes)
    pack_model(folder, run.out)
    run.write()
    run.say(f"model folder of {run.record['model_bytes'] / 1e6:.1f} MB packed")
    if run.clock.stopped:
        return

    @functools.cache
    def pipeline(dtype: str) -> Any:
        stored = type(net).stored_pipeline(folder, getattr(torch, dtype))
        stored.set_progress_bar_config(disable=True)
        return stored.to(device)

    def draw(prompts: Sequence[str], setting: ex.Setting) -> np.ndarray:
        return ex.paint(pipeline(setting.dtype), prompts, setting, max_sequence_length=net.text_tokens)

    if args.smoke:
        small = ex.Setting(64, 64, num_inference_steps=2, num_prompts=1)
        ex.save_sheet(run.out / "sheet.png", [draw(ex.SHOWN[:4], small)])
        ex.examine(draw, (small,), workers, seconds=20, found=run.found)
    else:
        ex.save_sheet(run.out / "sheet.png", sheet(draw))
        run.say("sheet drawn")
        ex.examine(draw, ex.SETTINGS[:1], workers, seconds=600, found=run.found)
    num = 1 if args.smoke else 256
    for name, scores in ex.controls(pipeline("float32").vae, atlas, workers, num_prompts=num, size=(128, 128)).items():
        run.found(name, scores)
    if not args.smoke:
        ex.examine(draw, ex.SETTINGS[1:], workers, seconds=run.clock.left_s() - END_S, found=run.found)
    run.say("\n" + ex.table(run.scores))


def sheet(draw: Callable[[Sequence[str], ex.Setting], np.ndarray]) -> list[np.ndarray]:
    """Captions of all sorts; counts and relations never trained; the first captions again, large."""
    hard = [q.prompt for q in examination(24) if q.kind in ("count, held out", "relation, held out")]
    large = [draw(ex.SHOWN[:8], ex.Setting(256, 256)), draw(ex.SHOWN[8:11], ex.Setting(192, 320))]
    return [draw(ex.SHOWN, ex.Setting()), draw(hard, ex.Setting()), *large]


def _count(module: torch.nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()) / 1e6:.2f} M"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="wall time of this run, everything included")
    parser.add_argument("--out", type=Path, required=True, help="folder for what the run leaves")
    parser.add_argument("--model", choices=FAMILIES, default="flux1")
    parser.add_argument("--from", dest="source", default="shipped", help="shipped, vae, nothing, or an earlier --out")
    parser.add_argument("--reserve-s", type=float, default=75.0, help="seconds kept for packing, drawing and judging")
    parser.add_argument("--decoder-seconds", type=float, default=0.0, help="seconds of decoder tuning before the rest")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--smoke", action="store_true", help="the whole path on a CPU in minutes; draws nothing good")
    return parser.parse_args()


def _tune_backends(*, seed: int) -> None:
    torch.manual_seed(seed)
    # cuDNN's attention backward fails at head_dim 32 on sm_90 (torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True  # a part that does not compile runs as it is
    torch._dynamo.config.recompile_limit = 64  # sizes x batches x with and without gradients


if __name__ == "__main__":
    main()
