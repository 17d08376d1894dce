"""Scores a model folder by the examination, setting by setting, with controls. Trains nothing.

    python -m fluxbatch.tiny.examine --out OUT                                  # the embedded FLUX.1, every setting
    python -m fluxbatch.tiny.examine --model tiny_flux2 --settings 192x192 float16 --prompts 64 --out OUT

Draws with diffusers' pipeline, on the GPU where there is one, while worker processes judge. In OUT, as it goes on:
log.txt and run.json; `python -m fluxbatch.tiny.install OUT` then completes the table of TRAINING.md.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import MapResult, Pool
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor

from fluxbatch.tiny import FOLDERS, NAMES
from fluxbatch.tiny.data import start_workers
from fluxbatch.tiny.examination import Question, examination
from fluxbatch.tiny.export import weights_digest
from fluxbatch.tiny.families import FAMILIES
from fluxbatch.tiny.judge import Checks, judge
from fluxbatch.tiny.record import Record
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.scenes import Scene
from fluxbatch.tiny.scores import Scores, Setting, settings_of
from fluxbatch.tiny.vae import Vae, decode, encode_pixels

EMBEDDED: dict[str, Any] = {NAMES[name]: family for name, family in FAMILIES.items()}
Draw = Callable[[Sequence[str], Setting], np.ndarray]
Found = Callable[[str, Scores, int], None]  # a line of the score table: its name, and of how many prompts a kind


class Artist:
    """Draws with a model folder as a user of diffusers does. Owns one pipeline a dtype."""

    def __init__(self, family: Any, folder: Path, device: torch.device) -> None:
        self.family, self.folder, self.device = family, folder, device
        self.told = family.call_settings(folder)
        self.pipelines: dict[str, Any] = {}

    def pipeline(self, dtype: str = "float32") -> Any:
        if dtype not in self.pipelines:
            pipeline = self.family.stored_pipeline(self.folder, getattr(torch, dtype)).to(self.device)
            pipeline.set_progress_bar_config(disable=True)
            self.pipelines[dtype] = pipeline
        return self.pipelines[dtype]

    @torch.no_grad()
    def draw(self, prompts: Sequence[str], setting: Setting) -> np.ndarray:
        """uint8 (N, H, W, 3); one seed a batch."""
        batch = max(8, 256 * 128 * 128 // (setting.height * setting.width))
        guidance_scale = setting.guidance_scale if self.family.guided else 1.0
        pictures = []
        for start in range(0, len(prompts), batch):
            drawn = self.pipeline(setting.dtype)(
                prompt=list(prompts[start : start + batch]),
                height=setting.height,
                width=setting.width,
                num_inference_steps=setting.num_inference_steps,
                guidance_scale=guidance_scale,
                generator=torch.Generator("cpu").manual_seed(start),
                output_type="pt",
                **self.told,
            ).images
            pictures.append(to_bytes(drawn.float()))
        return np.concatenate(pictures)


def to_bytes(pixels: Tensor) -> np.ndarray:
    """Pixels (B, 3, H, W) in 0..1 -> uint8 (B, H, W, 3) on the host."""
    return (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


@dataclass(frozen=True)
class Marking:
    """Pictures that the workers are still judging."""

    questions: Sequence[Question]
    checks: MapResult

    @classmethod
    def start(cls, questions: Sequence[Question], pictures: np.ndarray, workers: Pool) -> "Marking":
        jobs = [(pixels, question.scene) for pixels, question in zip(pictures, questions, strict=True)]
        return cls(questions, workers.map_async(_judge_one, jobs, chunksize=16))

    def scores(self) -> Scores:
        """Kind -> share of right answers, and for each of a kind's checks its own share."""
        tally: dict[str, list[bool]] = {}
        for question, checks in zip(self.questions, self.checks.get(), strict=True):
            tally.setdefault(question.kind, []).append(question.passed(checks))
            for name, right in checks.items():
                tally.setdefault(f"{question.kind}: {name}", []).append(right)
        return {name: round(float(np.mean(right)), 4) for name, right in tally.items()}


def _judge_one(job: tuple[np.ndarray, Scene]) -> Checks:
    pixels, scene = job
    return judge(pixels.astype(np.float32) / 255, scene)


@torch.no_grad()
def controls(vae: Vae, atlas: Atlas, workers: Pool, *, num_prompts: int, size: tuple[int, int]) -> dict[str, Scores]:
    """What the judge says of the truth, of the truth through the VAE, and of the truth of other prompts."""
    questions = examination(num_prompts)
    rows = torch.from_numpy(np.stack([question.row(atlas.index) for question in questions]))
    textures = atlas.textures.to(vae.device)
    truth, through = [], []
    for part in rows.to(vae.device).split(128):
        pixels = render(part, textures, height=size[0], width=size[1])
        truth.append(to_bytes(pixels))
        through.append(to_bytes(decode(vae, encode_pixels(vae, pixels)).float()))
    whole, shift = np.concatenate(truth), len(questions) // 3 + 5
    pictures = {
        f"control: ground truth, {size[0]}x{size[1]}": whole,
        f"control: VAE round trip, {size[0]}x{size[1]}": np.concatenate(through),
        f"control: shuffled prompts, {size[0]}x{size[1]}": np.roll(whole, shift, axis=0),
    }
    return {name: Marking.start(questions, some, workers).scores() for name, some in pictures.items()}


def examine(
    artist: Artist, settings: Sequence[Setting], workers: Pool, *, atlas: Atlas, seconds: float, found: Found
) -> None:
    """The first setting and the controls of its size, then every other one that there is time for."""
    start, first = time.monotonic(), settings[0]
    score(artist.draw, settings[:1], workers, seconds=float("inf"), found=found)
    size = (first.height, first.width)
    shown = controls(artist.pipeline().vae, atlas, workers, num_prompts=first.num_prompts, size=size)
    for name, scores in shown.items():
        found(name, scores, first.num_prompts)
    left_s = seconds - (time.monotonic() - start)
    score(artist.draw, settings[1:], workers, seconds=left_s, found=found)


def score(draw: Draw, settings: Sequence[Setting], workers: Pool, *, seconds: float, found: Found) -> None:
    """Of every setting that there is time for; the workers judge one while the device draws the next."""
    start, longest = time.monotonic(), 0.0
    pending: tuple[Setting, Marking] | None = None
    for setting in settings:
        began = time.monotonic()
        if began - start + longest > seconds:
            break
        questions = examination(setting.num_prompts)
        pictures = draw([question.prompt for question in questions], setting)
        marking = Marking.start(questions, pictures, workers)
        if pending:
            found(pending[0].name, pending[1].scores(), pending[0].num_prompts)
        pending = (setting, marking)
        longest = max(longest, time.monotonic() - began)
    if pending:
        found(pending[0].name, pending[1].scores(), pending[0].num_prompts)


def main() -> None:
    args = _arguments()
    family, folder = EMBEDDED[args.model], args.folder or FOLDERS[args.model]
    if not folder.is_dir():
        raise SystemExit(f"there is no model in {folder}")
    args.out.mkdir(parents=True, exist_ok=True)
    workers, atlas = start_workers(), Atlas()  # forked before CUDA is touched
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"model": family.name, "weights": weights_digest(folder)}
    record = Record(args.out, facts | machine(device))
    settings = _chosen(settings_of(guided=family.guided), args.settings)
    if args.prompts:
        settings = [replace(setting, num_prompts=args.prompts) for setting in settings]
    artist = Artist(family, folder, device)
    examine(artist, settings, workers, atlas=atlas, seconds=float("inf"), found=record.found)
    record.say("\n" + record.table())
    workers.terminate()


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}


def _chosen(settings: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
    chosen = [setting for setting in settings if not words or any(word in setting.name for word in words)]
    if not chosen:
        names = "; ".join(setting.name for setting in settings)
        raise SystemExit(f"--settings: none of the settings' names has one of {', '.join(words)}: {names}")
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for log.txt and run.json")
    parser.add_argument("--model", choices=EMBEDDED, default="tiny")
    parser.add_argument("--folder", type=Path, help="a model folder elsewhere; else the embedded one")
    parser.add_argument("--settings", nargs="+", default=[], help="those whose names contain one of these; else all")
    parser.add_argument("--prompts", type=int, help="of each kind; else as many as each setting has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
