"""One picture of many pictures, to look at what a model draws. Judges nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fluxbatch.tiny.examination import examination
from fluxbatch.tiny.scores import Setting

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


def drawn(draw: Callable[[Sequence[str], Setting], np.ndarray]) -> list[np.ndarray]:
    """Captions of all sorts; counts and relations never trained; the first captions again, large."""
    hard = [q.prompt for q in examination(24) if q.kind in ("count, held out", "relation, held out")]
    large = [draw(SHOWN[:8], Setting(256, 256)), draw(SHOWN[8:11], Setting(192, 320))]
    return [draw(SHOWN, Setting()), draw(hard, Setting()), *large]


def save(path: Path, blocks: Sequence[np.ndarray], *, width: int = 1024) -> None:
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
