"""The verbs that take words of their own instead of settings: what each is told, and what it answers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fluxbatch.errors import EXIT_DONE, ConfigError
from fluxbatch.progress import one_line

Words = Mapping[str, str]
Answer = tuple[dict[str, Any], str, int]


@dataclass(frozen=True, slots=True)
class WordVerb:
    """`words` are the keys that it takes; one that ends in a dot takes any name behind it. Values are literal text."""

    words: tuple[str, ...]
    usage: str
    do: Callable[[Words], Answer]


def read_words(verb: str, arguments: list[str]) -> dict[str, str]:
    """`key=value` arguments by key; ConfigError for any other word, or one that is said twice."""
    known = VERBS[verb].words
    words: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not key=value; {verb} takes {', '.join(map(_shown, known))}")
        if key not in known and not any(word.endswith(".") and key.startswith(word) and key != word for word in known):
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {_shown(close[0])}?" if close else f"{verb} takes {', '.join(map(_shown, known))}"
            raise ConfigError(f"{key} is not a word of {verb}; {hint}")
        if key in words:
            raise ConfigError(f"{key} must be given once, got {words[key]!r} and {value!r}")
        words[key] = value
    return words


def _shown(word: str) -> str:
    return f"{word}NAME=" if word.endswith(".") else f"{word}="


def manifest(words: Words) -> Answer:
    """A file of prompts in, a checked Parquet manifest out."""
    from fluxbatch.make_manifest import make_manifest, read_order

    order = read_order(words)
    made = make_manifest(order)
    lines = [
        f"rows: {made.rows:,} (of {made.records:,} in {order.source or 'the template'})",
        f"columns: {', '.join(made.columns)}",
        *(f"  {_example(row)}" for row in made.examples),
        f"written: {order.target}",
        f"next: python -m fluxbatch plan manifest.path={order.target}",
    ]
    return {**asdict(made), "written": str(order.target)}, "\n".join(lines), EXIT_DONE


def _example(row: Mapping[str, Any]) -> str:
    others = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("id", "prompt") and value != "")
    return one_line(f"{row['id']}: {row['prompt']}" + (f" ({others})" if others else ""))


VERBS: dict[str, WordVerb] = {
    "manifest": WordVerb(
        ("from", "to", "seeds", "sizes", "template", "values.", "columns."),
        "manifest from=prompts.csv|tsv|jsonl|txt|parquet to=prompts.parquet [columns.prompt=caption] "
        "[seeds=4 or seeds=[7,8]] [sizes=1024x1024,768x1344] "
        "[template='{product} on a {background}' values.background=[beach,desk]]",
        manifest,
    ),
}
