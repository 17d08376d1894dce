"""The little language that the embedded model speaks: scenes, their captions both ways, and where things stand.

Knows words and positions; knows neither pixels nor models. A caption is written with synonyms and read back to the
same scene, so that a picture can be judged from its prompt alone. Pairs that `held_out` names never occur in training.
"""

import random
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

SPRITES = Path(__file__).parent / "sprites.npz"

PALETTE = {
    "red": (0.89, 0.12, 0.14),
    "orange": (1.0, 0.52, 0.05),
    "yellow": (1.0, 0.86, 0.12),
    "green": (0.13, 0.66, 0.26),
    "blue": (0.13, 0.36, 0.92),
    "purple": (0.54, 0.20, 0.78),
    "pink": (1.0, 0.48, 0.72),
    "brown": (0.48, 0.28, 0.13),
    "black": (0.07, 0.07, 0.08),
    "white": (0.98, 0.98, 0.98),
    "gray": (0.55, 0.55, 0.57),
    "cyan": (0.15, 0.80, 0.86),
}
COLORS = tuple(PALETTE)
TINTS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "cyan")
COLOR_SYNONYMS = {
    "red": ("crimson", "scarlet"),
    "gray": ("grey",),
    "purple": ("violet",),
    "cyan": ("turquoise", "aqua"),
    "green": ("emerald",),
    "yellow": ("golden",),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "hexagon", "ring", "cross", "crescent")
CONTAINERS = ("circle", "square", "hexagon", "heart", "diamond")
TINTABLE = (
    "cat",
    "dog",
    "fox",
    "bear",
    "rabbit",
    "pig",
    "frog",
    "monkey",
    "bird",
    "fish",
    "dolphin",
    "whale",
    "octopus",
    "crab",
    "turtle",
    "butterfly",
    "dinosaur",
    "apple",
    "mushroom",
    "tree",
    "tulip",
    "rose",
    "leaf",
    "car",
    "bus",
    "rocket",
    "boat",
    "tractor",
    "umbrella",
    "balloon",
    "gift",
    "gem",
    "teddy bear",
    "guitar",
)
UNTITLED = ((0.97, 0.97, 0.97), (0.93, 0.95, 0.98), (0.98, 0.95, 0.90), (0.92, 0.97, 0.93))  # when none is asked for
SCENERY = {
    "night": ("at night", "under the stars at night", "at night under the moon"),
    "sunset": ("at sunset", "in front of a sunset"),
    "snow": ("in the snow", "in winter snow"),
    "meadow": ("on the grass", "in a meadow", "in a green field"),
    "beach": ("on the beach", "on a sandy beach"),
    "desert": ("in the desert",),
    "underwater": ("under water", "in the sea", "underwater"),
    "space": ("in space", "in outer space"),
}
# column and row of a 3 x 3 grid, then the ways to say it
PLACES = {
    "top left": ((0, 0), ("in the top left corner", ", top left")),
    "top": ((1, 0), ("at the top",)),
    "top right": ((2, 0), ("in the top right corner", ", top right")),
    "left": ((0, 1), ("on the left", "on the left side")),
    "center": ((1, 1), ("in the center", "in the middle", ", centered")),
    "right": ((2, 1), ("on the right", "on the right side")),
    "bottom left": ((0, 2), ("in the bottom left corner", ", bottom left")),
    "bottom": ((1, 2), ("at the bottom",)),
    "bottom right": ((2, 2), ("in the bottom right corner", ", bottom right")),
}
# where the first thing stands, seen from the second; then the ways to say it
RELATIONS = {
    "left": ((-1, 0), ("to the left of", "left of")),
    "right": ((1, 0), ("to the right of", "right of")),
    "above": ((0, -1), ("above", "on top of")),
    "below": ((0, 1), ("below", "under")),
    "beside": ((-1, 0), ("and", "next to", "beside")),
    "inside": ((0, 0), ("inside", "in")),
}
SIZES = {"small": (0.14, ("small", "tiny", "little")), "big": (0.43, ("big", "large", "huge"))}
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {
    "fish": "fish",
    "leaf": "leaves",
    "strawberry": "strawberries",
    "butterfly": "butterflies",
    "puppy": "puppies",
    "bunny": "bunnies",
    "bus": "buses",
    "octopus": "octopuses",
    "cactus": "cactuses",
    "trophy": "trophies",
    "cross": "crosses",
    "grapes": "grapes",
}
OPENINGS = ("a picture of ", "a drawing of ", "an image of ", "an icon of ")
# famous pairs that stay in training whatever their checksum says
KEPT = frozenset(
    {
        "red circle",
        "blue square",
        "green triangle",
        "yellow star",
        "red heart",
        "blue circle",
        "green circle",
        "yellow circle",
        "red square",
        "blue car",
        "red car",
        "green frog",
        "purple cat",
        "blue bird",
        "red balloon",
        "red apple",
        "green tree",
    }
)
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


@cache
def object_words() -> dict[str, tuple[str, ...]]:
    """Every object's name -> the words for it, the name first."""
    with np.load(SPRITES) as pack:
        words = [tuple(str(names).split("|")) for names in pack["names"]]
    return {names[0]: names for names in words}


def held_out(first: str, second: str) -> bool:
    """True for the (colour, noun) and (noun, noun) pairs that training never sees: about 1 in 8."""
    pair = f"{first} {second}"
    return pair not in KEPT and zlib.crc32(pair.encode()) % 8 == 0


def plural(word: str) -> str:
    return PLURALS.get(word, word + "s")


def with_article(words: str) -> str:
    if words == "grapes" or words.endswith(" grapes"):
        return words
    return ("an " if words[0] in "aeiou" and not words.startswith(("uni", "ufo")) else "a ") + words


# ---------------------------------------------------------------- writing captions


class Writer:
    """Draws scenes, words and jitter from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nouns = tuple(object_words())

    def scene(self) -> Scene:
        kind = self.random.choices(("single", "several", "pair", "inside"), (0.42, 0.17, 0.32, 0.09))[0]
        scene = getattr(self, f"_{kind}")()
        return replace(scene, background=self._background(scene))

    def _thing(self, *, avoid: str | None = None) -> Thing:
        if self.random.random() < 0.38:
            return self._shape(SHAPES, avoid=avoid)
        noun = self.random.choice(self.nouns)
        if noun in TINTABLE and self.random.random() < 0.5:
            return Thing(noun, self._color(noun, TINTS, avoid=avoid))
        return Thing(noun)

    def _shape(self, shapes: tuple[str, ...], *, avoid: str | None = None) -> Thing:
        noun = self.random.choice(shapes)
        return Thing(noun, self._color(noun, COLORS, avoid=avoid))

    def _color(self, noun: str, colors: tuple[str, ...], *, avoid: str | None) -> str:
        return self.random.choice([c for c in colors if c != avoid and not held_out(c, noun)])

    def _single(self) -> Scene:
        thing, choice = self._thing(), self.random.random()
        if choice < 0.2:
            return Scene((thing,), size=self.random.choice(tuple(SIZES)))
        return Scene((thing,), place=self.random.choice(tuple(PLACES)) if choice < 0.45 else None)

    def _several(self) -> Scene:
        thing = self._thing()
        while thing.noun == "grapes":
            thing = self._thing()
        return Scene((replace(thing, num=self.random.choice((2, 2, 3, 3, 4))),))

    def _pair(self) -> Scene:
        first = self._thing()
        relation = self.random.choices(tuple(RELATIONS)[:5], (2, 2, 2, 2, 3))[0]
        return Scene((first, self._partner(first)), relation=relation)

    def _inside(self) -> Scene:
        outer = self._shape(CONTAINERS)
        inner = self._thing(avoid=outer.color)
        while inner.noun == outer.noun or held_out(inner.noun, outer.noun):
            inner = self._thing(avoid=outer.color)
        return Scene((inner, outer), relation="inside")

    def _partner(self, first: Thing) -> Thing:
        while True:
            second = self._thing(avoid=first.color)
            if second.noun != first.noun and not held_out(first.noun, second.noun):
                return second

    def _background(self, scene: Scene) -> str | None:
        taken = {thing.color for thing in scene.things}
        choice = self.random.random()
        # A white or gray thing would vanish before the light background that nobody asked for.
        if choice < 0.26 and not taken & {"white", "gray"}:
            return None
        if choice < 0.76:
            free = [color for color in COLORS if color not in taken]
            return "white" if "white" in free and self.random.random() < 0.2 else self.random.choice(free)
        return self.random.choice(tuple(SCENERY))

    def caption(self, scene: Scene) -> str:
        article = self.random.random() < 0.88
        names = [self._name(thing, size=scene.size, article=article) for thing in scene.things]
        place = f" {self.random.choice(PLACES[scene.place][1])}".replace(" ,", ",") if scene.place else ""
        background = self._background_words(scene.background)
        middle = f" {self.random.choice(RELATIONS[scene.relation][1])} " if scene.relation else ""
        place_first = self.random.random() < 0.7 or background.startswith(",")
        text = middle.join(names) + (place + background if place_first else background + place)
        if self.random.random() < 0.08:
            text = self.random.choice(OPENINGS) + text
        if self.random.random() < 0.12:
            text = text[0].upper() + text[1:]
        return text + ("." if self.random.random() < 0.06 else "")

    def _name(self, thing: Thing, *, size: str | None, article: bool) -> str:
        words = object_words().get(thing.noun, (thing.noun,))
        word = self.random.choice(words) if self.random.random() < 0.3 else thing.noun
        size_word = self.random.choice(SIZES[size][1]) if size else ""
        color_word = self._color_word(thing.color) if thing.color else ""
        name = " ".join(filter(None, (size_word, color_word, plural(word) if thing.num > 1 else word)))
        if thing.num > 1:
            return f"{NUMBERS[thing.num]} {name}"
        return with_article(name) if article else name

    def _color_word(self, color: str) -> str:
        return (
            self.random.choice(COLOR_SYNONYMS[color])
            if color in COLOR_SYNONYMS and self.random.random() < 0.2
            else color
        )

    def _background_words(self, background: str | None) -> str:
        if background is None:
            return ""
        if background in SCENERY:
            return " " + self.random.choice(SCENERY[background])
        word = self._color_word(background)
        on = f"{with_article(word)} background"
        return self.random.choice((f" on {on}", f" on {on}", f", {word} background", f" on {word}", f" against {on}"))

    def row(self, scene: Scene, index: dict[tuple[str, str | None], int]) -> np.ndarray:
        """The scene as the renderer's flat row, every number jittered."""
        jitter = self.random.uniform
        placed = [
            replace(
                spot,
                rgb=self._jittered(spot.rgb) if spot.noun in SHAPES else spot.rgb,
                x=spot.x + jitter(-0.015, 0.015),
                y=spot.y + jitter(-0.015, 0.015),
                radius=spot.radius * jitter(0.93, 1.07),
            )
            for spot in layout(scene, wide=self.random.random() < 0.5)
        ]
        rgb = self.random.choice(UNTITLED) if scene.background is None else PALETTE.get(scene.background, (0, 0, 0))
        return to_row(scene, placed, index, background=rgb if scene.background is None else self._jittered(rgb))

    def _jittered(self, rgb: tuple[float, float, float]) -> tuple[float, float, float]:
        red, green, blue = (min(1.0, max(0.0, value + self.random.uniform(-0.03, 0.03))) for value in rgb)
        return red, green, blue


# ---------------------------------------------------------------- where things stand


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


# ---------------------------------------------------------------- reading captions


@cache
def _phrases() -> tuple[list[tuple[str, str, str]], dict[str, str], dict[str, tuple[str, int]]]:
    """(kind, phrase, meaning) longest phrase first; colour word -> colour; noun word -> (noun, at least how many)."""
    phrases = [("background", phrase, name) for name, said in SCENERY.items() for phrase in said]
    phrases += [("place", phrase.lstrip(", "), name) for name, (_, said) in PLACES.items() for phrase in said]
    colors = {word: color for color in COLORS for word in (color, *COLOR_SYNONYMS.get(color, ()))}
    nouns = {word: (noun, 1) for noun, words in object_words().items() for word in words}
    nouns |= {shape: (shape, 1) for shape in SHAPES}
    nouns |= {plural(word): (noun, 2) for word, (noun, _) in list(nouns.items()) if plural(word) != word}
    return sorted(phrases, key=lambda phrase: -len(phrase[1])), colors, nouns


def read_caption(caption: str) -> Scene | None:
    """The scene that a caption of the little language asks for; None for any other text."""
    text = caption.strip().rstrip(".").lower()
    for opening in OPENINGS:
        text = text.removeprefix(opening)
    text, background = _take_background(text)
    phrases, _, _ = _phrases()
    found: dict[str, str] = {"background": background} if background else {}
    for kind, phrase, meaning in phrases:
        match = re.search(rf"(,\s*|\s){re.escape(phrase)}(?!\w| of\b)", text)
        if match and kind not in found:
            found[kind] = meaning
            text = (text[: match.start()] + text[match.end() :]).strip()
    return _read_things(text.strip(" ,"), place=found.get("place"), background=found.get("background"))


def _take_background(text: str) -> tuple[str, str | None]:
    _, colors, _ = _phrases()
    words = "|".join(colors)
    match = re.search(rf"(?: on| against) an? ({words}) background|, ({words}) background| on ({words})(?=$|,| )", text)
    if not match:
        return text, None
    word = next(filter(None, match.groups()))
    return text[: match.start()] + text[match.end() :], colors[word]


def _read_things(text: str, *, place: str | None, background: str | None) -> Scene | None:
    said = sorted(
        ((phrase, name) for name, (_, ways) in RELATIONS.items() for phrase in ways), key=lambda p: -len(p[0])
    )
    for phrase, relation in said:
        first, found, second = text.partition(f" {phrase} ")
        if found:
            things = (_read_name(first), _read_name(second))
            if things[0] is None or things[1] is None or place:
                return None
            return Scene((things[0][0], things[1][0]), relation=relation, background=background)
    named = _read_name(text)
    return named and Scene((named[0],), place=place, size=named[1], background=background)


def _read_name(text: str) -> tuple[Thing, str | None] | None:
    """The thing and its size word's meaning, from `a small red car` or `three cats`."""
    _, colors, nouns = _phrases()
    num, size, color = 1, None, None
    text = re.sub(r"^an? ", "", text.strip())
    for number, word in NUMBERS.items():
        if text.startswith(word + " "):
            num, text = number, text.removeprefix(word + " ")
    for name, (_, said) in SIZES.items():
        if text.split(" ")[0] in said:
            size, text = name, text.partition(" ")[2]
    if text.split(" ")[0] in colors and text.split(" ")[0] not in nouns:
        color, text = colors[text.split(" ")[0]], text.partition(" ")[2]
    if text not in nouns:
        return None
    noun, least = nouns[text]
    if num < least or (noun in SHAPES and color is None):
        return None
    return Thing(noun, color, num), size
