"""Reads a picture back: which colours, shapes, objects and places are on it, and is that what the scene asked for.

Knows scenes and pixels, no model and nothing learned: palette colours in Lab, shapes by overlap with the ten outlines,
objects by the nearest sprite. Judges plain backgrounds only; pictures of sceneries are left unjudged.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from fluxbatch.tiny.render import TEXTURE, Atlas, shape_mask
from fluxbatch.tiny.scenes import (
    COLORS,
    NUMBERS,
    PALETTE,
    PLACES,
    RELATIONS,
    SCENERY,
    SHAPES,
    TINTABLE,
    TINTS,
    Scene,
    Thing,
    held_out,
    layout,
    object_words,
    plural,
    to_row,
    with_article,
)

# H W pixels, float32 rgb in 0..1; masks (H, W) bool

Checks = dict[str, bool]

FOREGROUND = 0.10  # largest channel difference to the background that still is background; the VAE strays by .06
SMALLEST_PIECE = 0.004  # of the picture: smaller components are the VAE's stray pixels, not things
SAME_SHAPE = 0.75  # least overlap with the outline; the VAE round trip of thin crescents reaches .79
SAME_OBJECT = 0.125  # largest mean channel distance to the sprite; the VAE round trip of a bicycle reaches .113
NEAR = 0.13  # of the side: how far from its place a thing may stand


# ---------------------------------------------------------------- measuring


def _lab(rgb: np.ndarray) -> np.ndarray:
    """CIE Lab (D65) with lightness weighted .7, since the renderer's shades vary in it; rgb (..., 3)."""
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear @ to_xyz.T / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    lightness, a, b = 116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])
    return np.stack([0.7 * lightness, a, b], -1)


PALETTE_LAB = _lab(np.array(list(PALETTE.values())))


def color_name(rgb: np.ndarray) -> str:
    return COLORS[int(np.linalg.norm(PALETTE_LAB - _lab(np.asarray(rgb, float)), axis=1).argmin())]


def background_color(pixels: np.ndarray) -> np.ndarray:
    """Median of a frame of three pixels."""
    frame = np.ones(pixels.shape[:2], bool)
    frame[3:-3, 3:-3] = False
    return np.median(pixels[frame], 0)


def components(mask: np.ndarray) -> list[np.ndarray]:
    """4-connected pieces of at least SMALLEST_PIECE of the picture, largest first. Runs of each line are joined where
    they touch runs of the line above (union-find)."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    parent = list(range(len(starts)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    runs = [(int(y), int(left), int(right)) for (y, left), (_, right) in zip(starts, ends, strict=True)]
    above = 0
    for number, (y, left, right) in enumerate(runs):
        while runs[above][0] < y - 1 or (runs[above][0] == y - 1 and runs[above][2] <= left):
            above += 1
        touching = above
        while runs[touching][0] == y - 1 and runs[touching][1] < right:
            parent[root(number)] = root(touching)
            touching += 1
    return _pieces(mask.shape, runs, [root(number) for number in range(len(runs))])


def _pieces(shape: tuple[int, ...], runs: list[tuple[int, int, int]], roots: list[int]) -> list[np.ndarray]:
    area: dict[int, int] = {}
    for (_, left, right), root in zip(runs, roots, strict=True):
        area[root] = area.get(root, 0) + right - left
    kept = [
        root for root in sorted(area, key=lambda root: -area[root]) if area[root] >= SMALLEST_PIECE * np.prod(shape)
    ]
    pieces = {root: np.zeros(shape, bool) for root in kept}
    for (y, left, right), root in zip(runs, roots, strict=True):
        if root in pieces:
            pieces[root][y, left:right] = True
    return list(pieces.values())


def inside_color(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Median colour of a mask, its outermost pixels left out where enough remain."""
    core = eroded(mask)
    return np.median(pixels[core if core.sum() > 8 else mask], 0)


def eroded(mask: np.ndarray) -> np.ndarray:
    core = mask.copy()
    core[1:] &= mask[:-1]
    core[:-1] &= mask[1:]
    core[:, 1:] &= mask[:, :-1]
    core[:, :-1] &= mask[:, 1:]
    return core


def _square_box(mask: np.ndarray) -> tuple[int, int, int]:
    """Top, left and side of the square around a mask, centred on its bounding box."""
    ys, xs = np.nonzero(mask)
    top, bottom, left, right = ys.min(), ys.max() + 1, xs.min(), xs.max() + 1
    side = int(max(bottom - top, right - left))
    return int(top + bottom - side) // 2, int(left + right - side) // 2, side


def _cut(array: np.ndarray, box: tuple[int, int, int], *, outside: np.ndarray | float) -> np.ndarray:
    """The box of a picture or mask, scaled to 32 x 32, float32; what lies beyond the edge has the value `outside`."""
    top, left, side = box
    square = np.full((side, side, *array.shape[2:]), outside, np.float32)
    y0, x0 = max(0, top), max(0, left)
    part = array[y0 : top + side, x0 : left + side]
    square[y0 - top : y0 - top + part.shape[0], x0 - left : x0 - left + part.shape[1]] = part
    channels = square[..., None] if square.ndim == 2 else square
    scaled = [
        np.asarray(Image.fromarray(np.ascontiguousarray(channels[..., c])).resize((32, 32), Image.Resampling.BILINEAR))
        for c in range(channels.shape[-1])
    ]
    return np.stack(scaled, -1) if array.ndim == 3 else scaled[0]


@cache
def _outlines() -> np.ndarray:
    masks = [shape_mask(name) > 0.5 for name in SHAPES]
    return np.stack([_cut(mask, _square_box(mask), outside=0.0) for mask in masks])


def shape_name(mask: np.ndarray) -> tuple[str, float]:
    """The shape whose outline overlaps most with the mask once both fill the same square, and the overlap (IoU)."""
    fitted, outlines = _cut(mask, _square_box(mask), outside=0.0), _outlines()
    overlap = np.minimum(fitted, outlines).sum((1, 2)) / np.maximum(fitted, outlines).sum((1, 2))
    return SHAPES[int(overlap.argmax())], float(overlap.max())


@cache
def _sprites() -> tuple[list[tuple[str, str | None]], np.ndarray, np.ndarray]:
    """(noun, tint) of every sprite; premultiplied rgb (N, 32, 32, 3); alpha (N, 32, 32, 1)."""
    atlas = Atlas()
    keys = [key for key in atlas.index if key[0] not in SHAPES]
    # sprites fill their texture but for a margin of two pixels
    box = (2, 2, TEXTURE - 4)
    textures = atlas.textures.numpy().transpose(0, 2, 3, 1)
    rgba = np.stack([_cut(textures[atlas.index[key]], box, outside=0.0) for key in keys])
    return keys, rgba[..., :3], rgba[..., 3:]


def object_name(pixels: np.ndarray, mask: np.ndarray, background: np.ndarray) -> tuple[tuple[str, str | None], float]:
    """(noun, tint) of the sprite that looks most like the masked part before that background, and its distance."""
    keys, rgb, alpha = _sprites()
    seen = _cut(pixels, _square_box(mask), outside=background)
    distance = np.abs(rgb + background.astype(np.float32) * (1 - alpha) - seen).mean((1, 2, 3))
    return keys[int(distance.argmin())], float(distance.min())


# ---------------------------------------------------------------- judging


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


# ---------------------------------------------------------------- the examination


@dataclass(frozen=True)
class Question:
    """One prompt of the examination. `headline` names the checks that its kind is scored by; empty means all."""

    kind: str
    prompt: str
    scene: Scene
    headline: tuple[str, ...] = ()

    def row(self, index: dict[tuple[str, str | None], int]) -> np.ndarray:
        """What a perfect model draws, for the renderer."""
        background = PALETTE[self.scene.background or "white"]
        return to_row(self.scene, layout(self.scene), index, background=background)

    def passed(self, checks: Checks) -> bool:
        return all(checks[name] for name in self.headline or checks)


def examination(num_prompts: int, *, seed: int = 7) -> list[Question]:
    """`num_prompts` questions of every kind. Kinds that end in `held out` ask for pairs that training never saw."""
    draw = random.Random(seed)
    return [question for kind in _KINDS for question in _take(kind, num_prompts, draw)]


def _take(kind: str, num_prompts: int, draw: random.Random) -> Iterator[Question]:
    ask, headline = _KINDS[kind]
    for number in range(num_prompts):
        prompt, scene = ask(draw, number, kind.endswith("held out"))
        yield Question(kind, prompt, scene, headline)


# White and gray are hard to tell from the light background that the prompts name.
VIVID = tuple(color for color in COLORS if color not in ("white", "gray"))


def _pairs(colors: Iterable[str], nouns: Iterable[str], *, held: bool) -> list[tuple[str, str]]:
    return [(color, noun) for color in colors for noun in nouns if held_out(color, noun) == held]


def _plain(words: str, background: str, things: tuple[Thing, ...], **more: str) -> tuple[str, Scene]:
    return f"{words} on {with_article(background)} background", Scene(things, background=background, **more)


def _ask_shape(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    pairs = _pairs(VIVID, SHAPES, held=held)
    color, noun = pairs[number % len(pairs)] if held else draw.choice(pairs)
    return _plain(with_article(f"{color} {noun}"), "white", (Thing(noun, color),))


def _ask_background(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    color, noun = draw.choice(_pairs(COLORS, SHAPES, held=held))
    background = draw.choice([other for other in COLORS if other != color])
    return _plain(with_article(f"{color} {noun}"), background, (Thing(noun, color),))


def _ask_place(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    place = draw.choice(tuple(PLACES))
    color, noun = draw.choice(_pairs(VIVID, SHAPES, held=held))
    words = f"{with_article(f'{color} {noun}')} {PLACES[place][1][0]}"
    return _plain(words, "white", (Thing(noun, color),), place=place)


def _ask_object(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    nouns = tuple(object_words())
    noun = nouns[number % len(nouns)]
    background = draw.choice(("white", "white", "blue", "yellow", "green", "pink"))
    return _plain(with_article(noun), background, (Thing(noun),))


def _ask_tint(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    pairs = _pairs(TINTS, TINTABLE, held=held)
    color, noun = pairs[number % len(pairs)] if held else draw.choice(pairs)
    return _plain(with_article(f"{color} {noun}"), "white", (Thing(noun, color),))


def _ask_count(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    num = draw.choice(tuple(NUMBERS))
    color, noun = draw.choice(_pairs(VIVID, SHAPES, held=held))
    return _plain(f"{NUMBERS[num]} {color} {plural(noun)}", "white", (Thing(noun, color, num),))


def _ask_relation(draw: random.Random, number: int, held: bool) -> tuple[str, Scene]:
    known = _pairs(VIVID, SHAPES, held=False)
    while True:
        (color, noun), (other_color, other_noun) = draw.sample(known, 2)
        if color != other_color and noun != other_noun and held_out(noun, other_noun) == held:
            break
    relation = draw.choice(tuple(RELATIONS)[:4])
    first, second = with_article(f"{color} {noun}"), with_article(f"{other_color} {other_noun}")
    words = f"{first} {RELATIONS[relation][1][0]} {second}"
    return _plain(words, "white", (Thing(noun, color), Thing(other_noun, other_color)), relation=relation)


_KINDS = {
    "background": (_ask_background, ("background", "color")),
    "shape": (_ask_shape, ("color", "shape")),
    "shape, held out": (_ask_shape, ("color", "shape")),
    "place": (_ask_place, ("color", "place")),
    "object": (_ask_object, ("object",)),
    "tint": (_ask_tint, ("object", "tint")),
    "tint, held out": (_ask_tint, ("object", "tint")),
    "count": (_ask_count, ("count", "all right")),
    "relation": (_ask_relation, ("relation",)),
    "relation, held out": (_ask_relation, ("relation",)),
}


def score(questions: Iterable[Question], pictures: Iterable[np.ndarray]) -> dict[str, float]:
    """Kind -> share of its questions that were answered rightly."""
    answers: dict[str, list[bool]] = {}
    for question, pixels in zip(questions, pictures, strict=True):
        answers.setdefault(question.kind, []).append(question.passed(judge(pixels, question.scene)))
    return {kind: round(sum(right) / len(right), 4) for kind, right in answers.items()}
