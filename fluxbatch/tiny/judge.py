"""Reads a picture back: is that on it what the scene asked for? Judges plain backgrounds only; sceneries are left
unjudged. Knows scenes and measurements, no model."""

from dataclasses import dataclass

import numpy as np

from fluxbatch.tiny.measure import (
    FOREGROUND,
    background_color,
    color_name,
    components,
    eroded,
    inside_color,
    object_name,
    shape_name,
)
from fluxbatch.tiny.scenes import Scene, Thing
from fluxbatch.tiny.words import PLACES, RELATIONS, SCENERY

Checks = dict[str, bool]

SAME_SHAPE = 0.75  # least overlap with the outline; the VAE round trip of thin crescents reaches .79
SAME_OBJECT = 0.16  # largest distance to the sprite; the VAE round trip of a bicycle reaches .118
NEAR = 0.13  # of the side: how far from its place a thing may stand


@dataclass(frozen=True)
class Picture:
    """A picture taken apart: its background and the pieces before it."""

    pixels: np.ndarray
    background: np.ndarray
    pieces: list[np.ndarray]

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Picture":
        background = background_color(pixels)
        return cls(pixels, background, components(np.abs(pixels - background).max(-1) > FOREGROUND))

    @property
    def mask(self) -> np.ndarray:
        return np.logical_or.reduce([*self.pieces, np.zeros(self.pixels.shape[:2], bool)])


def at_judging_size(pixels: np.ndarray) -> np.ndarray:
    """Pictures of 192 pixels a side and more are halved, so that all are judged at about the same size."""
    pixels = np.asarray(pixels, np.float32)
    while min(pixels.shape[:2]) >= 192:
        height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
        pixels = pixels[: 2 * height, : 2 * width].reshape(height, 2, width, 2, 3).mean((1, 3))
    return pixels


def judge(pixels: np.ndarray, scene: Scene) -> Checks:
    """Named checks of a picture (H, W, 3) float in 0..1 against a scene; empty where there is nothing to judge."""
    if scene.background in SCENERY:
        return {}
    picture = Picture.of(at_judging_size(pixels))
    checks = {"background": color_name(picture.background) == scene.background} if scene.background else {}
    first = scene.things[0]
    if scene.relation == "inside":
        return checks | _judge_inside(picture, first, scene.things[1])
    if scene.relation:
        return checks | _judge_pair(picture, scene)
    if first.num > 1:
        return checks | _judge_several(picture, first)
    checks |= _judge_thing(picture, picture.mask, first, pieces=len(picture.pieces))
    if scene.place:
        checks["place"] = _stands_at(picture.mask, PLACES[scene.place][0])
    return checks


def _judge_thing(picture: Picture, mask: np.ndarray, thing: Thing, *, pieces: int) -> Checks:
    """Shapes: colour, outline and oneness. Objects: the nearest sprite, of the asked tint where one is asked for."""
    if not mask.any():
        return {"color": False, "shape": False} if thing.is_shape else {"object": False}
    if thing.is_shape:
        name, overlap = shape_name(mask)
        right = name == thing.noun and overlap >= SAME_SHAPE and pieces == 1
        return {"color": color_name(inside_color(picture.pixels, mask)) == thing.color, "shape": right}
    (noun, tint), distance = object_name(picture.pixels, mask, picture.background)
    checks = {"object": noun == thing.noun and distance < SAME_OBJECT}
    return checks | ({"tint": tint == thing.color} if thing.color else {})


def _judge_several(picture: Picture, thing: Thing) -> Checks:
    """As many equal things as asked for. Objects may consist of pieces, so these only count what stands apart."""
    whole = [piece for piece in picture.pieces if piece.sum() >= 0.3 * picture.pieces[0].sum()]
    found = picture.pieces if thing.is_shape else whole
    each = [_judge_thing(picture, piece, thing, pieces=1) for piece in found]
    return {"count": len(found) == thing.num, "all right": bool(each) and all(all(one.values()) for one in each)}


def _judge_pair(picture: Picture, scene: Scene) -> Checks:
    """Each half of the picture must show its own thing: the right shape in the right colour in the right place."""
    dx, dy = RELATIONS[scene.relation or "beside"][0]
    halves: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for piece in picture.pieces:
        y, x = _center(piece)
        halves[int((x - 0.5) * dx + (y - 0.5) * dy < 0)].append(piece)
    if not all(halves):
        return {"relation": False}
    right = [
        all(_judge_thing(picture, np.logical_or.reduce(half), thing, pieces=len(half)).values())
        for half, thing in zip(halves, scene.things, strict=True)
    ]
    return {"relation": all(right)}


def _judge_inside(picture: Picture, inner: Thing, outer: Thing) -> Checks:
    if not picture.pieces:
        return {"inside": False}
    mask = picture.pieces[0]
    frame = Picture(picture.pixels, inside_color(picture.pixels, mask), [])
    core = eroded(eroded(eroded(mask)))
    within = components(core & (np.abs(picture.pixels - frame.background).max(-1) > FOREGROUND))
    if not within:
        return {"inside": False}
    outside = _judge_thing(picture, mask, outer, pieces=len(picture.pieces))
    inside = _judge_thing(frame, np.logical_or.reduce(within), inner, pieces=len(within))
    return {"inside": all(outside.values()) and all(inside.values())}


def _center(mask: np.ndarray) -> tuple[float, float]:
    ys, xs = np.nonzero(mask)
    return float(ys.mean() + 0.5) / mask.shape[0], float(xs.mean() + 0.5) / mask.shape[1]


def _stands_at(mask: np.ndarray, cell: tuple[int, int]) -> bool:
    if not mask.any() or mask.mean() > 0.35:
        return False
    y, x = _center(mask)
    return abs(x - (0.24 + 0.26 * cell[0])) < NEAR and abs(y - (0.24 + 0.26 * cell[1])) < NEAR
