"""Measures a picture: palette colours in Lab, connected pieces, shapes by outline, objects by the nearest sprite.

Knows pixels and the textures of the renderer, nothing learned; knows no scenes.
"""

from functools import cache

import numpy as np
from PIL import Image

from fluxbatch.tiny.render import TEXTURE, Atlas, shape_mask
from fluxbatch.tiny.words import COLORS, PALETTE, SHAPES

# H W pixels, float32 rgb in 0..1; masks (H, W) bool

FOREGROUND = 0.10  # largest channel difference to the background that still is background; the VAE strays by .06
OUTLINE_WEIGHT = 0.25  # of a sprite's outline beside its colours; the margin to the next sprite grows by half
SHORTLIST = 24  # sprites compared more closely
SMALLEST_PIECE = 0.004  # of the picture: smaller components are the VAE's stray pixels, not things


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
    """(noun, tint) of the sprite that looks most like the masked part before that background, and its distance.

    A balloon's string may be too faint for the mask, which then is cut too small: larger cuts are compared too, with
    the sprites that come nearest on every fourth pixel of a line.
    """
    keys, rgb, alpha = _sprites()
    expected = rgb + background.astype(np.float32) * (1 - alpha)
    box = _square_box(mask)
    boxes = [box, *_larger(box)]
    coarse = [_cut(pixels, some, outside=background)[::4, ::4] for some in boxes]
    roughly = np.min([np.abs(expected[:, ::4, ::4] - seen).mean((1, 2, 3)) for seen in coarse], axis=0)
    near = roughly.argsort()[:SHORTLIST]
    distances = np.min([_distances(expected[near], pixels, mask, background, some) for some in boxes], axis=0)
    return keys[int(near[distances.argmin()])], float(distances.min())


def _distances(
    expected: np.ndarray, pixels: np.ndarray, mask: np.ndarray, background: np.ndarray, box: tuple[int, int, int]
) -> np.ndarray:
    """Of each expected picture (N, 32, 32, 3) to the box: of the colours, and of what stands out from the background,
    so that a thin bicycle is no balloon in the background's colour."""
    seen, outline = _cut(pixels, box, outside=background), _cut(mask, box, outside=0.0)
    stands_out = np.abs(expected - background).max(-1) > FOREGROUND
    return np.abs(expected - seen).mean((1, 2, 3)) + OUTLINE_WEIGHT * np.abs(stands_out - outline).mean((1, 2))


def _larger(box: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Squares a little larger that share the box's centre or one side's middle."""
    top, left, side = box
    grown = [(round(side * more) - side) for more in (1.08, 1.16, 1.25)]
    places = ((0.5, 0.5), (0, 0.5), (1, 0.5), (0.5, 0), (0.5, 1))  # of the growth that goes above, and to the left
    return [(top - round(g * up), left - round(g * aside), side + g) for g in grown for up, aside in places if g]
