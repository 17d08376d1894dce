"""Draws rows of scenes.py at any size, on any device. Knows textures and pixels; knows neither words nor models."""

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from fluxbatch.tiny.sceneries import PAINTERS, Canvas
from fluxbatch.tiny.scenes import MAX_THINGS, SCENERY_NUMBER
from fluxbatch.tiny.words import PALETTE, SHAPES, SPRITES, TINTABLE, TINTS, object_words

# B rows, H W pixels of the supersampled canvas, rgb(a) channels first

TEXTURE = 128  # pixels a side
Points = list[tuple[float, float]]


def _polygon(name: str) -> Points:
    """Corners of a shape in the square -1..1, y downwards."""
    star = [(0.97 if i % 2 == 0 else 0.42, math.pi * i / 5) for i in range(10)]
    heart = [2 * math.pi * i / 119 for i in range(120)]
    corners: dict[str, Points] = {
        "square": [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)],
        "triangle": [(0, -0.9), (0.95, 0.78), (-0.95, 0.78)],
        "diamond": [(0, -0.97), (0.66, 0), (0, 0.97), (-0.66, 0)],
        "star": [(r * math.sin(a), 0.06 - r * math.cos(a)) for r, a in star],
        "hexagon": [(0.95 * math.cos(math.pi * i / 3), 0.95 * math.sin(math.pi * i / 3)) for i in range(6)],
        "heart": [(16 * math.sin(t) ** 3 / 17.2, -_heart_height(t) / 17.2) for t in heart],
        "cross": [(x * a, y * b) for x, y in ((1, 1), (-1, 1), (-1, -1), (1, -1)) for a, b in _cross_corner(x * y)],
    }
    return corners[name]


def _heart_height(t: float) -> float:
    return 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) + 2.5


def _cross_corner(turn: int) -> Points:
    corner = [(0.93, 0.3), (0.3, 0.3), (0.3, 0.93)]
    return corner if turn > 0 else corner[::-1]


ELLIPSES = {  # (left, top, right, bottom) filled, then one cut out of it
    "circle": [(-0.95, -0.95, 0.95, 0.95)],
    "ring": [(-0.95, -0.95, 0.95, 0.95), (-0.5, -0.5, 0.5, 0.5)],
    "crescent": [(-0.9, -0.95, 1.0, 0.95), (-0.3, -0.8, 1.3, 0.8)],
}


@cache
def shape_mask(name: str) -> np.ndarray:
    """Coverage of a shape, (TEXTURE, TEXTURE) float32 in 0..1."""
    fine = 4 * TEXTURE
    image = Image.new("L", (fine, fine), 0)
    draw = ImageDraw.Draw(image)
    for ellipse, fill in zip(ELLIPSES.get(name, ()), (255, 0), strict=False):
        draw.ellipse([fine / 2 * (1 + edge) for edge in ellipse], fill=fill)
    if name not in ELLIPSES:
        draw.polygon([(fine / 2 * (1 + x), fine / 2 * (1 + y)) for x, y in _polygon(name)], fill=255)
    return np.asarray(image.resize((TEXTURE, TEXTURE), Image.Resampling.BOX), np.float32) / 255


def tinted(rgba: np.ndarray, color: str) -> np.ndarray:
    """A sprite in shades of one colour: its brightness stays, its saturation becomes the colour's."""
    value = rgba[..., :3].max(-1)
    saturation = (value - rgba[..., :3].min(-1)) / np.maximum(value, 1e-4)
    saturation = np.clip(saturation * 1.15, 0, 1)[..., None]
    hue = np.array(PALETTE[color]) / max(PALETTE[color])
    return np.concatenate([(value**0.75)[..., None] * (1 - saturation * (1 - hue)), rgba[..., 3:]], -1)


class Atlas:
    """All textures as one premultiplied (N, 4, TEXTURE, TEXTURE) tensor; `index[noun, tint or None]` is the place."""

    def __init__(self) -> None:
        with np.load(SPRITES) as pack:
            sprites = dict(zip(object_words(), pack["rgba"].astype(np.float32) / 255, strict=True))
        textures: dict[tuple[str, str | None], np.ndarray] = {}
        textures |= {(name, None): np.repeat(shape_mask(name)[None], 4, 0) for name in SHAPES}
        textures |= {(noun, None): _premultiplied(rgba) for noun, rgba in sprites.items()}
        textures |= {(noun, c): _premultiplied(tinted(sprites[noun], c)) for noun in TINTABLE for c in TINTS}
        self.index: dict[tuple[str, str | None], int] = {key: place for place, key in enumerate(textures)}
        self.textures = torch.from_numpy(np.stack(list(textures.values())).astype(np.float32))


def _premultiplied(rgba: np.ndarray) -> np.ndarray:
    return np.concatenate([rgba[..., :3] * rgba[..., 3:], rgba[..., 3:]], -1).transpose(2, 0, 1)


@torch.no_grad()
def render(rows: Tensor, textures: Tensor, *, height: int, width: int) -> Tensor:
    """Rows (B, ROW) -> pixels (B, 3, height, width) in 0..1, on the device of the textures. Small sizes are drawn at
    twice the size and averaged."""
    fine = 2 if min(height, width) <= 144 else 1
    rows = rows.to(textures.device, torch.float32)
    tall, broad = height * fine, width * fine
    pixels = rows[:, 1:4, None, None].expand(-1, 3, tall, broad).clone()
    for name, number in SCENERY_NUMBER.items():
        chosen = (rows[:, 0] == number).nonzero()[:, 0]
        if len(chosen):
            canvas = Canvas(tall, broad, num_images=len(chosen), device=textures.device)
            pixels[chosen] = PAINTERS[name](canvas).expand(len(chosen), 3, tall, broad).clamp(0, 1)
    for thing in range(MAX_THINGS):
        spots = rows[:, 4 + 7 * thing : 11 + 7 * thing]
        chosen = (spots[:, 0] >= 0).nonzero()[:, 0]
        if len(chosen):
            pixels[chosen] = _stamped(pixels[chosen], spots[chosen], textures)
    return (F.avg_pool2d(pixels, fine) if fine > 1 else pixels).clamp(0, 1)


def _stamped(pixels: Tensor, spots: Tensor, textures: Tensor) -> Tensor:
    """One thing laid over each picture; spots (B, 7): texture, rgb, x, y, radius."""
    tall, broad = pixels.shape[2:]
    radius = spots[:, 6:7] * min(tall, broad)
    x = ((torch.arange(broad, device=pixels.device) + 0.5)[None] - spots[:, 4:5] * broad) / radius
    y = ((torch.arange(tall, device=pixels.device) + 0.5)[None] - spots[:, 5:6] * tall) / radius
    grid = torch.stack([x[:, None].expand(-1, tall, -1), y[:, :, None].expand(-1, -1, broad)], -1)
    stamp = F.grid_sample(textures[spots[:, 0].long()], grid, padding_mode="zeros", align_corners=False)
    return pixels * (1 - stamp[:, 3:]) + stamp[:, :3] * spots[:, 1:4, None, None]
