"""Files of prompts as people have them: CSV, TSV, JSON lines, plain text, Parquet. Knows no rule for a row.

Every record comes with the line it begins on (in Parquet: its row), so that a refusal can name it. Python's own readers
do this, and not pyarrow's: they count lines through quoted line breaks, keep `007`, dates and 64-bit seeds as written.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.errors import ManifestError

Record = tuple[int, dict[str, Any]]
SEPARATORS = ",;\t"
MAX_FIELD = 2**31 - 1  # characters; Python's own limit would refuse a prompt of 128 kB


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file whose columns are known. `types`: those of Parquet, text in a CSV, none in JSON, where rows tell."""

    path: Path
    columns: tuple[str, ...]
    records: Callable[[], Iterator[Record]]
    types: dict[str, pa.DataType] = field(default_factory=dict)
    unit: str = "line"

    def place(self, number: int) -> str:
        """`prompts.csv: line 7`."""
        return f"{self.path}: {self.unit} {number}"


def open_prompts(path: Path) -> PromptFile:
    """Look at the columns of a file; raises ManifestError where it is none of ours or cannot be read."""
    opened = OPENERS.get(path.suffix.lower())
    if opened is None:
        raise ManifestError(f"from must end in one of {', '.join(OPENERS)}, got {path}")
    if not path.is_file():
        raise ManifestError(f"from must name a file, got {path} (from {Path.cwd()})")
    return opened(path)


def _open_text(path: Path) -> PromptFile:
    return PromptFile(path, ("prompt",), partial(_text_records, path), {"prompt": pa.string()})


def _text_records(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        yield number, {"prompt": line}


def _open_json(path: Path) -> PromptFile:
    names = dict.fromkeys(name for _, record in _json_records(path) for name in record)
    return PromptFile(path, tuple(names), partial(_json_records, path))


def _json_records(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path}: line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ManifestError(f"{path}: line {number}: a line must be one JSON object, got {line[:60]}")
        yield number, record


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, without their ends, numbered from 1."""
    with _decoded(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.rstrip("\r\n")


def _open_table(path: Path) -> PromptFile:
    with _decoded(path) as file:
        separator = _separator(file.readline())
    number, header = next(_cells(path, separator), (1, []))
    names = [name.strip() for name in header]
    if not names or not all(names):
        raise ManifestError(f"{path}: line {number}: every column must have a name, got {','.join(header)!r}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ManifestError(f"{path}: line {number}: column {twice[0]} stands twice")
    records = partial(_table_records, path, separator, names)
    return PromptFile(path, tuple(names), records, dict.fromkeys(names, pa.string()))


def _separator(header: str) -> str:
    """What a spreadsheet of whatever country put between the names; a comma where there is one name."""
    return max(SEPARATORS, key=header.count)


def _table_records(path: Path, separator: str, names: list[str]) -> Iterator[Record]:
    rows = _cells(path, separator)
    next(rows)
    for number, cells in rows:
        if len(cells) != len(names):
            raise ManifestError(f"{path}: line {number}: {len(cells)} values where the header has {len(names)} columns")
        yield number, {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _cells(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Each row with the line that it begins on; blank lines are none."""
    csv.field_size_limit(MAX_FIELD)
    with _decoded(path, newline="") as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        first = 1
        try:
            for cells in reader:
                if cells:
                    yield first, cells
                first = reader.line_num + 1
        except csv.Error as error:
            raise ManifestError(f"{path}: line {first}: not CSV: {error}") from error


class _decoded:
    """A text file in UTF-8, with or without a byte order mark; what is not UTF-8 is refused with its line."""

    def __init__(self, path: Path, newline: str | None = None) -> None:
        self._path, self._newline = path, newline

    def __enter__(self) -> TextIO:
        self._file = open(self._path, encoding="utf-8-sig", newline=self._newline)
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, UnicodeDecodeError):
            raise ManifestError(f"{self._path}: line {_undecodable(self._path)}: text must be UTF-8") from error


def _undecodable(path: Path) -> int:
    """The first line with bytes that are no UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if "\ufffd" in line.decode(errors="replace"):
                return number
    return 1


def _open_parquet(path: Path) -> PromptFile:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise ManifestError(f"{path}: not a whole Parquet file: {error}") from error
    types = dict(zip(schema.names, schema.types, strict=True))
    return PromptFile(path, tuple(schema.names), partial(_parquet_records, path), types, unit="row")


def _parquet_records(path: Path) -> Iterator[Record]:
    first = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(8192):
                yield from enumerate(batch.to_pylist(), first)
                first += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: cannot be read from row {first} on: {error}") from error


OPENERS: dict[str, Callable[[Path], PromptFile]] = {
    ".csv": _open_table,
    ".tsv": _open_table,
    ".jsonl": _open_json,
    ".ndjson": _open_json,
    ".txt": _open_text,
    ".parquet": _open_parquet,
}
