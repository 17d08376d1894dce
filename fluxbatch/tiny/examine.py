"""Draws the examination with a pipeline and has worker processes judge it, setting by setting. Trains nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import MapResult, Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fluxbatch.tiny.examination import Question, examination
from fluxbatch.tiny.judge import Checks, judge
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.scenes import Scene
from fluxbatch.tiny.vae import Vae, decode, encode_pixels

Pipeline = Any  # diffusers' lazy imports hide its attributes from mypy
Scores = dict[str, float]
SHOWN = (
    "a red circle",
    "a blue square on a yellow background",
    "a green triangle",
    "a purple star on a black background",
    "a cat on a pink background",
    "a fox in the snow",
    "a rocket in space",
    "a blue car on the beach",
    "two red hearts",
    "three yellow stars at night",
    "a red circle to the left of a blue square",
    "a green triangle above an orange circle",
    "a penguin and a snowman in the snow",
    "a castle at sunset",
    "a purple cat in a meadow",
    "a fish under water",
    "a small red balloon in the top right corner",
    "a huge pizza",
    "a yellow heart inside a pink hexagon",
    "four apples on a blue background",
    "a dinosaur in the desert",
    "a ghost at night",
    "an owl above a pumpkin at night",
    "a green frog on a white background",
)


@dataclass(frozen=True)
class Setting:
    """How a line of the score table was drawn."""

    height: int = 128
    width: int = 128
    num_inference_steps: int = 20
    guidance_scale: float = 3.5
    dtype: str = "float32"
    num_prompts: int = 256  # of each kind

    @property
    def name(self) -> str:
        name = f"{self.height}x{self.width}, {self.num_inference_steps} steps, guidance {self.guidance_scale:g}"
        return name + (f", {self.dtype}" if self.dtype != "float32" else "")


# in the order of their worth, should time run out
SETTINGS = (
    Setting(),
    Setting(96, 160),
    Setting(160, 96),
    Setting(112, 144),
    Setting(144, 112),
    Setting(256, 256, num_prompts=64),
    Setting(num_inference_steps=8),
    Setting(dtype="bfloat16"),
    Setting(192, 192, num_prompts=64),
    Setting(guidance_scale=1.0, num_prompts=128),
    Setting(num_inference_steps=4),
    Setting(dtype="float16"),
    Setting(192, 320, num_prompts=48),
    Setting(320, 192, num_prompts=48),
    Setting(guidance_scale=5.0, num_prompts=128),
)


@torch.no_grad()
def paint(
    pipeline: Pipeline, prompts: Sequence[str], setting: Setting, *, max_sequence_length: int, seed: int = 0
) -> np.ndarray:
    """uint8 (N, H, W, 3); one seed a batch."""
    batch = max(8, 256 * 128 * 128 // (setting.height * setting.width))
    pictures = []
    for start in range(0, len(prompts), batch):
        drawn = pipeline(
            prompt=list(prompts[start : start + batch]),
            height=setting.height,
            width=setting.width,
            num_inference_steps=setting.num_inference_steps,
            guidance_scale=setting.guidance_scale,
            max_sequence_length=max_sequence_length,
            generator=torch.Generator("cpu").manual_seed(seed + start),
            output_type="pt",
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
        "control: ground truth": whole,
        "control: VAE round trip": np.concatenate(through),
        "control: shuffled prompts": np.roll(whole, shift, axis=0),
    }
    return {name: Marking.start(questions, some, workers).scores() for name, some in pictures.items()}


def examine(
    draw: Callable[[Sequence[str], Setting], np.ndarray],
    settings: Sequence[Setting],
    workers: Pool,
    *,
    seconds: float,
    found: Callable[[str, Scores], None],
) -> None:
    """Scores of every setting that there is time for; the workers judge one while the device draws the next."""
    start, longest = time.monotonic(), 0.0
    pending: tuple[str, Marking] | None = None
    for setting in settings:
        began = time.monotonic()
        if began - start + longest > seconds:
            break
        questions = examination(setting.num_prompts)
        pictures = draw([question.prompt for question in questions], setting)
        marking = Marking.start(questions, pictures, workers)
        if pending:
            found(pending[0], pending[1].scores())
        pending = (setting.name, marking)
        longest = max(longest, time.monotonic() - began)
    if pending:
        found(pending[0], pending[1].scores())


def headlines(scores: Scores) -> Scores:
    return {kind: share for kind, share in scores.items() if ":" not in kind}


def table(report: dict[str, Scores]) -> str:
    """The headline of every kind, a line a setting, as Markdown."""
    kinds = list(headlines(next(iter(report.values()), {})))
    lines = [["setting (height x width)", *kinds], ["---"] * (len(kinds) + 1)]
    lines += [[name, *(f"{scores.get(kind, float('nan')):.3f}" for kind in kinds)] for name, scores in report.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def save_sheet(path: Path, blocks: Sequence[np.ndarray], *, width: int = 1024) -> None:
    """Blocks of equal pictures (N, H, W, 3), one below the other, each in lines as wide as fit."""
    sheets = [_tiled(block, columns=max(1, width // block.shape[2])) for block in blocks]
    sheet = Image.new("RGB", (max(s.width for s in sheets), sum(s.height for s in sheets)), "white")
    top = 0
    for part in sheets:
        sheet.paste(part, (0, top))
        top += part.height
    sheet.save(path)


def _tiled(pictures: np.ndarray, *, columns: int) -> Image.Image:
    _, height, width, _ = pictures.shape
    sheet = Image.new("RGB", (columns * width, -(-len(pictures) // columns) * height), "white")
    for place, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (place % columns * width, place // columns * height))
    return sheet
