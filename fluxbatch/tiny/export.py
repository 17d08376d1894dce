"""Writes the model folder, examines what was written, and packs it for the way home. Trains nothing."""

import io
import json
import shutil
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor

from fluxbatch.tiny.data import Vae, encode_pixels
from fluxbatch.tiny.flow import GUIDANCE_RANGE, TEXT_TOKENS, Net
from fluxbatch.tiny.judge import Checks, Question, examination, judge
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.scenes import Scene
from fluxbatch.tiny.vae import decode

Pipeline = Any  # FluxPipeline: diffusers' lazy imports hide its attributes from mypy
PIECE_BYTES = 15 << 20
DEFAULTS = {"width": 128, "height": 128, "num_inference_steps": 20, "guidance_scale": 3.5}
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
    """How a column of the score table was drawn."""

    height: int = 128
    width: int = 128
    num_inference_steps: int = 20
    guidance_scale: float = 3.5
    dtype: str = "float32"
    true_cfg_scale: float = 1.0
    num_prompts: int = 256

    @property
    def name(self) -> str:
        name = f"{self.height}x{self.width}, {self.num_inference_steps} steps, guidance {self.guidance_scale:g}"
        name += f", {self.dtype}" if self.dtype != "float32" else ""
        return name + (f", two passes at {self.true_cfg_scale:g}" if self.true_cfg_scale > 1 else "")


# in the order of their worth, should time run out
SETTINGS = (
    Setting(),
    Setting(96, 160),
    Setting(160, 96),
    Setting(112, 144),
    Setting(144, 112),
    Setting(num_inference_steps=8),
    Setting(num_inference_steps=4),
    Setting(dtype="float16"),
    Setting(dtype="bfloat16"),
    Setting(256, 256, num_prompts=96),
    Setting(guidance_scale=1.0),
    Setting(guidance_scale=5.0),
    Setting(192, 192, num_prompts=96),
    Setting(192, 320, num_prompts=64),
)
# of the undistilled model: what guidance is worth, and whether GUIDANCE_STRENGTH is well chosen
PREVIEWS = (
    Setting(guidance_scale=1.0, num_prompts=48),
    Setting(guidance_scale=1.0, true_cfg_scale=2.25, num_prompts=48),
    Setting(guidance_scale=1.0, true_cfg_scale=3.5, num_prompts=48),
)


def assemble(folder: Path, net: Net, vae: Vae) -> Pipeline:
    """The folder's pipeline around other weights."""
    parts = {"transformer": net.transformer, "text_encoder": net.clip, "text_encoder_2": net.t5, "vae": vae}
    return _quiet(FluxPipeline.from_pretrained(folder, local_files_only=True, **parts))


def _quiet(pipeline: Pipeline) -> Pipeline:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_model(folder: Path, *, source: Path, net: Net, vae: Vae, sizes: Sequence[tuple[int, int]]) -> int:
    """Float16 safetensors in diffusers' layout; returns the folder's bytes. `net` and `vae` are float16 afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    assemble(source, net, vae).to(dtype=torch.float16).save_pretrained(folder, safe_serialization=True)
    defaults = DEFAULTS | {
        "max_sequence_length": TEXT_TOKENS,
        "buckets": [[width, height] for height, width in sizes],
        "guidance_range": GUIDANCE_RANGE,
    }
    (folder / "defaults.json").write_text(json.dumps(defaults, indent=1))
    _forget_paths(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _forget_paths(folder: Path) -> None:
    """diffusers writes down where each part was loaded from; that is of this machine only."""
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        if content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=1))


@torch.no_grad()
def paint(pipeline: Pipeline, prompts: Sequence[str], setting: Setting, *, seed: int = 0) -> np.ndarray:
    """uint8 (N, H, W, 3); one seed a batch."""
    batch = max(8, 256 * 128 * 128 // (setting.height * setting.width))
    pictures = []
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        two_passes = {"true_cfg_scale": setting.true_cfg_scale, "negative_prompt": [""] * len(part)}
        pictures.append(
            pipeline(
                prompt=part,
                height=setting.height,
                width=setting.width,
                num_inference_steps=setting.num_inference_steps,
                guidance_scale=setting.guidance_scale,
                max_sequence_length=TEXT_TOKENS,
                generator=torch.Generator("cpu").manual_seed(seed + start),
                output_type="np",
                **(two_passes if setting.true_cfg_scale > 1 else {}),
            ).images
        )
    return (np.concatenate(pictures).clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _judge_one(job: tuple[np.ndarray, Scene]) -> Checks:
    pixels, scene = job
    return judge(pixels.astype(np.float32) / 255, scene)


Report = dict[str, dict[str, float]]


def marks(questions: Sequence[Question], pictures: np.ndarray, workers: Pool) -> dict[str, float]:
    """Kind -> share of right answers, and for each of a kind's checks its own share."""
    jobs = [(pixels, question.scene) for pixels, question in zip(pictures, questions, strict=True)]
    tally: dict[str, list[bool]] = {}
    for question, checks in zip(questions, workers.map(_judge_one, jobs, chunksize=16), strict=True):
        tally.setdefault(question.kind, []).append(question.passed(checks))
        for name, right in checks.items():
            tally.setdefault(f"{question.kind}: {name}", []).append(right)
    return {name: round(float(np.mean(right)), 4) for name, right in tally.items()}


@torch.no_grad()
def controls(vae: Vae, atlas: Atlas, workers: Pool, *, num_prompts: int, size: tuple[int, int]) -> Report:
    """What the judge says of the truth, of the truth through the VAE, and of the truth of other prompts."""
    questions = examination(num_prompts)
    rows = torch.from_numpy(np.stack([question.row(atlas.index) for question in questions]))
    textures, device = atlas.textures.to(vae.device), vae.device
    truth, through = [], []
    for part in rows.to(device).split(128):
        pixels = render(part, textures, height=size[0], width=size[1])
        truth.append(_bytes(pixels))
        through.append(_bytes(decode(vae, encode_pixels(vae, pixels)).float()))
    whole, shift = np.concatenate(truth), len(questions) // 3 + 5
    return {
        "control: ground truth": marks(questions, whole, workers),
        "control: VAE round trip": marks(questions, np.concatenate(through), workers),
        "control: shuffled prompts": marks(questions, np.roll(whole, shift, axis=0), workers),
    }


def _bytes(pixels: Tensor) -> np.ndarray:
    return (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def examine(
    pipelines: Callable[[str], Pipeline],
    settings: Sequence[Setting],
    workers: Pool,
    *,
    seconds: float,
    say: Callable[[str], None],
) -> Report:
    """Marks of every setting that there is time for; `pipelines` gives the pipeline of a dtype."""
    report: Report = {}
    start, longest = time.monotonic(), 0.0
    for setting in settings:
        began = time.monotonic()
        if began - start + longest > seconds:
            say(f"no time left for {setting.name}")
            continue
        questions = examination(setting.num_prompts)
        pictures = paint(pipelines(setting.dtype), [question.prompt for question in questions], setting)
        report[setting.name] = marks(questions, pictures, workers)
        longest = max(longest, time.monotonic() - began)
        say(f"{setting.name}: mean {np.mean([v for k, v in report[setting.name].items() if ':' not in k]):.3f}")
    return report


def table(report: Report) -> str:
    """The headline of every kind, a line a setting."""
    kinds = [kind for kind in next(iter(report.values()), {}) if ":" not in kind]
    lines = [" | ".join(["setting", *kinds])]
    lines += [
        " | ".join([name, *(f"{scores.get(kind, float('nan')):.3f}" for kind in kinds)])
        for name, scores in report.items()
    ]
    return "\n".join(lines)


def save_grid(path: Path, pictures: np.ndarray, *, columns: int) -> None:
    _, height, width, _ = pictures.shape
    lines = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width, lines * height), "white")
    for place, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (place % columns * width, place // columns * height))
    sheet.save(path)


def save_pieces(content: bytes, folder: Path, name: str) -> None:
    """NAME.00, NAME.01, ...: files small enough to be carried."""
    for number, start in enumerate(range(0, len(content), PIECE_BYTES)):
        (folder / f"{name}.{number:02d}").write_bytes(content[start : start + PIECE_BYTES])


def load_pieces(folder: Path, name: str) -> bytes | None:
    pieces = sorted(folder.glob(f"{name}.[0-9][0-9]"))
    return b"".join(piece.read_bytes() for piece in pieces) if pieces else None


def pack_model(folder: Path, out: Path) -> None:
    """model.tar.00, ...: `cat model.tar.* | tar x` gives the folder `model`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, "model")
    save_pieces(buffer.getvalue(), out, "model.tar")
