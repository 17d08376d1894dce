"""Writes training scenes and their captions, every choice from one seeded generator. Knows no pixels.

A caption is written with synonyms and read back to the same scene (`reader.py`). Pairs that `words.held_out` names
never occur.
"""

import random
from dataclasses import dataclass, replace

import numpy as np

from fluxbatch.tiny.scenes import Scene, Thing, layout, to_row
from fluxbatch.tiny.words import (
    COLOR_SYNONYMS,
    COLORS,
    CONTAINERS,
    NUMBERS,
    OPENINGS,
    PALETTE,
    PLACES,
    RELATIONS,
    SCENERY,
    SHAPES,
    SIZES,
    TINTABLE,
    TINTS,
    UNTITLED,
    held_out,
    object_words,
    plural,
    with_article,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """How often scenes of this kind are drawn, and how often a thing of theirs is a shape and no object."""

    share: float
    shapes: float


# Counts and pairs need their things small and each in its place, which takes the most practice: with 32 pairs and 17
# counts in 100 scenes, and 38 shapes in 100 things, one training scene in 20 was a pair of shapes, and of these the
# model drew 1 in 5.
KINDS = {
    "single": Kind(share=0.28, shapes=0.42),
    "several": Kind(share=0.22, shapes=0.62),
    "pair": Kind(share=0.42, shapes=0.65),
    "inside": Kind(share=0.08, shapes=0.38),
}
ROW_SHARE = 0.2  # of threes stand in a row, where they must be a quarter smaller


class Writer:
    """Draws scenes, words and jitter from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nouns = tuple(object_words())

    def scene(self) -> Scene:
        kind = self.random.choices(tuple(KINDS), [kind.share for kind in KINDS.values()])[0]
        scene = getattr(self, f"_{kind}")()
        return replace(scene, background=self._background(scene))

    def _thing(self, kind: str, *, avoid: str | None = None) -> Thing:
        if self.random.random() < KINDS[kind].shapes:
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
        thing, choice = self._thing("single"), self.random.random()
        if choice < 0.2:
            return Scene((thing,), size=self.random.choice(tuple(SIZES)))
        return Scene((thing,), place=self.random.choice(tuple(PLACES)) if choice < 0.45 else None)

    def _several(self) -> Scene:
        thing = self._thing("several")
        while thing.noun == "grapes":
            thing = self._thing("several")
        return Scene((replace(thing, num=self.random.choice((2, 3, 3, 4))),))

    def _pair(self) -> Scene:
        first = self._thing("pair")
        relation = self.random.choices(tuple(RELATIONS)[:5], (3, 3, 3, 3, 2))[0]
        return Scene((first, self._partner(first)), relation=relation)

    def _inside(self) -> Scene:
        outer = self._shape(CONTAINERS)
        inner = self._thing("inside", avoid=outer.color)
        while inner.noun == outer.noun or held_out(inner.noun, outer.noun):
            inner = self._thing("inside", avoid=outer.color)
        return Scene((inner, outer), relation="inside")

    def _partner(self, first: Thing) -> Thing:
        while True:
            second = self._thing("pair", avoid=first.color)
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
            for spot in layout(scene, wide=self.random.random() < ROW_SHARE)
        ]
        rgb = self.random.choice(UNTITLED) if scene.background is None else PALETTE.get(scene.background, (0, 0, 0))
        return to_row(scene, placed, index, background=rgb if scene.background is None else self._jittered(rgb))

    def _jittered(self, rgb: tuple[float, float, float]) -> tuple[float, float, float]:
        red, green, blue = (min(1.0, max(0.0, value + self.random.uniform(-0.03, 0.03))) for value in rgb)
        return red, green, blue
