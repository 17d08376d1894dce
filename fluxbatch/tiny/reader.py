"""Reads a caption of the little language back to its scene, so that a picture can be judged from its prompt alone."""

import re
from functools import cache

from fluxbatch.tiny.scenes import Scene, Thing
from fluxbatch.tiny.words import (
    COLOR_SYNONYMS,
    COLORS,
    NUMBERS,
    OPENINGS,
    PLACES,
    RELATIONS,
    SCENERY,
    SHAPES,
    SIZES,
    object_words,
    plural,
)


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
