"""The words of the little language: colours, shapes, objects, places, relations, and how English bends them.

Knows words and which pairs of them are held out; knows neither scenes nor pixels.
"""

import zlib
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
