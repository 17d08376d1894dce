"""Scenes of the little language and where their things stand on the canvas. Knows positions, no sentences."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fluxbatch.tiny.words import PALETTE, PLACES, RELATIONS, SCENERY, SHAPES, SIZES

MAX_THINGS = 4


@dataclass(frozen=True, slots=True)
class Thing:
    """`num` equal shapes or objects; `color` is None where an object keeps its own colours."""

    noun: str
    color: str | None = None
    num: int = 1

    @property
    def is_shape(self) -> bool:
        return self.noun in SHAPES


@dataclass(frozen=True, slots=True)
class Scene:
    """One or two things before a background: a colour, a scenery, or None (light, unsaid)."""

    things: tuple[Thing, ...]
    relation: str | None = None
    place: str | None = None
    size: str | None = None
    background: str | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """One thing on the canvas: centre in shares of width and height, radius in shares of the shorter side."""

    noun: str
    color: str | None
    rgb: tuple[float, float, float]
    x: float
    y: float
    radius: float


def layout(scene: Scene, *, wide: bool = False) -> list[Placed]:
    """The scene's things on the canvas, back to front, without jitter. `wide` puts three things in one row."""
    first = scene.things[0]
    if scene.relation == "inside":
        outer = scene.things[1]
        room = 0.2 if outer.noun in ("circle", "square", "hexagon") else 0.16
        return [_placed(outer, 0.5, 0.5, 0.43), _placed(first, 0.5, 0.5, room)]
    if scene.relation:
        dx, dy = (0.23 * step for step in RELATIONS[scene.relation][0])
        return [_placed(first, 0.5 + dx, 0.5 + dy, 0.19), _placed(scene.things[1], 0.5 - dx, 0.5 - dy, 0.19)]
    if first.num > 1:
        spots, radius = _spots(first.num, wide=wide)
        return [_placed(first, x, y, radius) for x, y in spots]
    if scene.place:
        column, line = PLACES[scene.place][0]
        return [_placed(first, 0.24 + 0.26 * column, 0.24 + 0.26 * line, 0.20)]
    low = 0.58 if scene.background in SCENERY else 0.52
    return [_placed(first, 0.5, low, SIZES[scene.size][0] if scene.size else 0.31)]


def _spots(num: int, *, wide: bool) -> tuple[list[tuple[float, float]], float]:
    if num == 2:
        return [(0.27, 0.5), (0.73, 0.5)], 0.19
    if num == 3 and wide:
        return [(0.19, 0.5), (0.5, 0.5), (0.81, 0.5)], 0.135
    if num == 3:
        return [(0.5, 0.27), (0.27, 0.72), (0.73, 0.72)], 0.18
    return [(0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73)], 0.18


def _placed(thing: Thing, x: float, y: float, radius: float) -> Placed:
    rgb = PALETTE[thing.color] if thing.is_shape and thing.color else (1.0, 1.0, 1.0)
    return Placed(thing.noun, None if thing.is_shape else thing.color, rgb, x, y, radius)


ROW = 4 + 7 * MAX_THINGS
SCENERY_NUMBER = {name: number for number, name in enumerate(SCENERY, start=1)}


def to_row(
    scene: Scene,
    placed: Iterable[Placed],
    index: dict[tuple[str, str | None], int],
    *,
    background: tuple[float, float, float],
) -> np.ndarray:
    """Flat float32: scenery number, background rgb, then MAX_THINGS x (texture or -1, rgb, x, y, radius)."""
    row = np.zeros(ROW, np.float32)
    row[0], row[1:4], row[4::7] = SCENERY_NUMBER.get(scene.background or "", 0), background, -1
    for number, spot in enumerate(placed):
        start = 4 + 7 * number
        row[start : start + 7] = (index[spot.noun, spot.color], *spot.rgb, spot.x, spot.y, spot.radius)
    return row
