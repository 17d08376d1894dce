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
import os
import signal
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from fluxbatch.tiny import sheet
from fluxbatch.tiny.checkpoint import Checkpoint, vae_numbers
from fluxbatch.tiny.data import SHARES, SMOKE_SHARES, Captions, fill_buckets, start_workers, write_captions
from fluxbatch.tiny.examine import Artist, examine, machine
from fluxbatch.tiny.export import pack_model, write_model
from fluxbatch.tiny.families import FAMILIES
from fluxbatch.tiny.flow import Bucket, TokenIds
from fluxbatch.tiny.record import Record
from fluxbatch.tiny.rehearse import rehearsal
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.scores import settings_of
from fluxbatch.tiny.trainer import Clock, Progress, Trainer, tune_backends
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

VAE_SHARE, DISTILL_SHARE = 0.2, 0.12  # of the training time, where there is such a stage
END_S = 8.0  # kept for what workers still judge, and for leaving


@dataclass(kw_only=True)
class Run(Record):
    """A training run: its record knows its progress too."""

    clock: Clock
    progress: Progress

    def known(self) -> dict[str, Any]:
        return super().known() | vars(self.progress)


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
    given = {"arguments": {name: str(value) for name, value in vars(args).items()}}
    run = Run(args.out, given, clock=Clock(args.minutes), progress=Progress())
    workers, atlas = start_workers(), Atlas()  # forked before CUDA is touched
    signal.signal(signal.SIGTERM, run.clock.stop)
    family, shares = FAMILIES[args.model], SMOKE_SHARES if args.smoke else SHARES
    with tempfile.TemporaryDirectory() as work:
        begun = begin(family, args.source, work=Path(work), progress=run.progress)
        tune_backends(seed=1 + run.progress.steps)
        num, tokenise = sum(share.num_samples for share in shares), family.tokenise(begun.template)
        writing = write_captions(workers, num, seed=1 + run.progress.steps, index=atlas.index, tokenise=tokenise)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        net, vae, textures = begun.net.to(device).eval(), begun.vae.to(device), atlas.textures.to(device)
        run.facts |= {"model": family.name} | machine(device)
        parameters = f"{_count(net)} and a VAE of {_count(vae)} parameters"
        run.say(f"{family.name} from {args.source}: {parameters}, on {run.facts['device']}")
        with rehearsal(family.name, begun.template, device=device, log=args.out / "rehearsal.txt"):
            captions = writing.result()
            run.say(f"{num} captions written")
            ready_vae(run, vae, captions, textures, trained=begun.vae_is_trained, args=args)
            buckets = make_data(run, net, vae, captions, textures, args=args)
            trainer, empty = ready_trainer(run, net, vae, buckets, template=begun.template, args=args)
        train(run, trainer, buckets, empty=empty, template=begun.template, args=args)
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


def make_data(
    run: Run, net: Any, vae: Vae, captions: Captions, textures: Tensor, *, args: argparse.Namespace
) -> list[Bucket]:
    shares = SMOKE_SHARES if args.smoke else SHARES
    rotary = {(share.height, share.width): net.rotary(share.height, share.width) for share in shares}
    dtype = torch.bfloat16 if textures.is_cuda else torch.float32
    encoder = copy.deepcopy(vae).to(dtype=dtype, memory_format=torch.channels_last)
    buckets = list(fill_buckets(shares, captions, vae=encoder, textures=textures, rotary=rotary))
    run.say(f"latents: {sum(bucket.latents.nbytes for bucket in buckets) / 1e9:.2f} GB")
    return buckets


def ready_trainer(
    run: Run, net: Any, vae: Vae, buckets: list[Bucket], *, template: Path, args: argparse.Namespace
) -> tuple[Trainer, TokenIds]:
    """With its steps compiled and captured; and the tokens of no caption."""

    def keep(average: dict[str, Tensor]) -> None:
        done = run.progress
        parts = (net.name, average, vae.state_dict(), vae_numbers(vae), done.steps, done.samples, done.trained_s)
        Checkpoint(*parts).save(run.out)
        run.write()

    trainer = Trainer(net, progress=run.progress, clock=run.clock, say=run.say, keep=keep)
    empty = tuple(torch.from_numpy(ids).to(trainer.device).long() for ids in net.tokenise(template)([""]))
    trainer.record_flow(buckets, SMOKE_SHARES if args.smoke else SHARES, empty=empty)
    return trainer, empty


def train(
    run: Run, trainer: Trainer, buckets: list[Bucket], *, empty: TokenIds, template: Path, args: argparse.Namespace
) -> None:
    """Flow matching, a checkpoint, then distillation where the family has guidance. Leaves the average in the net."""
    net, shares, clock = trainer.net, SMOKE_SHARES if args.smoke else SHARES, run.clock
    distill_s = DISTILL_SHARE * (clock.left_s() - args.reserve_s) if net.guided else 0.0
    trainer.match_flow(rate=args.lr, until_left_s=args.reserve_s + distill_s)
    trainer.keep(trainer.averaged())
    run.say("checkpoint written")
    if net.guided and not clock.stopped:
        teacher = type(net).fresh(template).to(trainer.device).eval().requires_grad_(False)
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
    run.facts["model_bytes"] = write_model(folder, source=template, net=net, vae=vae, sizes=sizes)
    pack_model(folder, run.out)
    run.write()
    run.say(f"model folder of {run.facts['model_bytes'] / 1e6:.1f} MB packed")
    if run.clock.stopped:
        return
    artist = Artist(type(net), folder, device)
    settings = settings_of(guided=net.guided)
    if args.smoke:
        settings = (replace(settings[0], num_inference_steps=2, num_prompts=1),)
        sheet.save(run.out / "sheet.png", [artist.draw(sheet.SHOWN[:4], settings[0])])
    else:
        sheet.save(run.out / "sheet.png", sheet.drawn(artist.draw))
    run.say("sheet drawn")
    examine(artist, settings, workers, atlas=atlas, seconds=run.clock.left_s() - END_S, found=run.found)
    run.say("\n" + run.table())


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


if __name__ == "__main__":
    main()
