"""The examination: prompts of every kind with the scenes that they ask for, many of combinations never trained."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fluxbatch.tiny.judge import Checks, judge
from fluxbatch.tiny.scenes import Scene, Thing, layout, to_row
from fluxbatch.tiny.words import (
    COLORS,
    NUMBERS,
    PALETTE,
    PLACES,
    RELATIONS,
    SHAPES,
    TINTABLE,
    TINTS,
    held_out,
    object_words,
    plural,
    with_article,
)


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
    "background, held out": (_ask_background, ("background", "color")),
    "place": (_ask_place, ("color", "place")),
    "place, held out": (_ask_place, ("color", "place")),
    "object": (_ask_object, ("object",)),
    "tint": (_ask_tint, ("object", "tint")),
    "tint, held out": (_ask_tint, ("object", "tint")),
    "count": (_ask_count, ("count", "all right")),
    "count, held out": (_ask_count, ("count", "all right")),
    "relation": (_ask_relation, ("relation",)),
    "relation, held out": (_ask_relation, ("relation",)),
}


def score(questions: Iterable[Question], pictures: Iterable[np.ndarray]) -> dict[str, float]:
    """Kind -> share of its questions that were answered rightly."""
    answers: dict[str, list[bool]] = {}
    for question, pixels in zip(questions, pictures, strict=True):
        answers.setdefault(question.kind, []).append(question.passed(judge(pixels, question.scene)))
    return {kind: round(sum(right) / len(right), 4) for kind, right in answers.items()}
