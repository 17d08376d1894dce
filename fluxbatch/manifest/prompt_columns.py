"""Cells of a prompt file, text or JSON values, to columns in the types that the rules of a manifest read.

A cell that has no such value is named by its line. Knows nothing of what the rules ask for.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pyarrow as pa

from fluxbatch.config import SEED_MAX, SEED_MIN
from fluxbatch.errors import ManifestError
from fluxbatch.manifest.prompt_files import PromptFile, Record
from fluxbatch.manifest.rows import SEED

INT64_MAX = 2**63 - 1
TYPES = {
    "id": pa.string(),
    "prompt": pa.string(),
    "negative_prompt": pa.string(),
    "height": pa.int64(),
    "width": pa.int64(),
    "num_inference_steps": pa.int64(),
    "guidance_scale": pa.float64(),
    "seed": SEED,
}


def typed_columns(source: PromptFile, chunk: list[Record]) -> pa.Table:
    """The columns of some rows: ours in types that the rules read, the file's own in those that they have."""
    names = dict.fromkeys([*source.columns, *(name for _, row in chunk for name in row)])
    return pa.table({name: _column(source, name, chunk) for name in names})


def _column(source: PromptFile, name: str, chunk: list[Record]) -> pa.Array:
    if name not in TYPES:
        return _own_column(source, name, chunk)
    values = []
    for number, row in chunk:
        try:
            values.append(READERS[name](row.get(name)))
        except ValueError as error:
            raise ManifestError(f"{source.place(number)}: {name} {error}, got {row[name]!r}") from error
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values, TYPES[name])


def _own_column(source: PromptFile, name: str, chunk: list[Record]) -> pa.Array:
    try:
        return pa.array([row.get(name) for _, row in chunk], source.types.get(name))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        first, last = chunk[0][0], chunk[-1][0]
        raise ManifestError(
            f"{source.path}: {source.unit}s {first} to {last}: column {name} must hold values of one type: {error}"
        ) from error


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("must be text")
    return _encodable(value)


def _row_id(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise ValueError("must be text or an integer")
    return _encodable(None if value is None else str(value))


def _encodable(value: str | None) -> str | None:
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that UTF-8 can write") from None
    return value


def _number(value: Any) -> int | float | None:
    """Exact integers where it says one; text as in a CSV."""
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[+-]?\d{1,40}", text):
            return _number(int(text))
        if not re.fullmatch(r"[+-]?(\d*\.?\d+|\d+\.)([eE][+-]?\d+)?|[+-]?inf|nan", text):
            raise ValueError("must be a number")
        return float(text)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | None):
        raise ValueError("must be a number")
    if isinstance(value, int):
        return max(-INT64_MAX, min(value, INT64_MAX))  # what is larger is too large for every rule
    return None if value is None else float(value)


def _guidance(value: Any) -> float | None:
    number = _number(value)
    return None if number is None else float(number)


def _seed(value: Any) -> Decimal | None:
    text = str(value).strip()
    if value is None or text.lower() == "nan":
        return None
    match = re.fullmatch(r"([+-]?\d{1,20})(\.0*)?", text)
    if isinstance(value, bool) or not match or not SEED_MIN <= int(match[1]) <= SEED_MAX:
        raise ValueError("must be an integer from -2^63 to 2^64-1")
    if isinstance(value, float) and abs(value) > 2**53:
        raise ValueError("must be an integer (exact in a float only up to 2^53)")
    return Decimal(int(match[1]))


READERS = {
    "id": _row_id,
    "prompt": _text,
    "negative_prompt": _text,
    "height": _number,
    "width": _number,
    "num_inference_steps": _number,
    "guidance_scale": _guidance,
    "seed": _seed,
}
