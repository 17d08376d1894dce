"""A file of prompts in, a checked Parquet manifest out; seeds, sizes and template grids multiply the rows.

The rows are checked by the very rules of a job, but for those that only a model knows. One bad row and nothing is
written: a person is there to mend it. Memory is that of the ids and one chunk; the file is read twice.
"""

from __future__ import annotations

import csv
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import islice, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.config import MAX_SIDE, SEED_MAX, SEED_MIN, ManifestConfig, ModelConfig
from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.manifest.files import COLUMNS, OUTPUT_COLUMNS, open_manifest
from fluxbatch.manifest.prompt_columns import INT64_MAX, TYPES, typed_columns
from fluxbatch.manifest.prompt_files import PromptFile, Record, open_prompts
from fluxbatch.manifest.rows import SEED, check_rows
from fluxbatch.records import RowRules
from fluxbatch.storage import commit

CHUNK_ROWS = 8192
NAMED_FAULTS = 5
EXAMPLES = 3
MAX_SEEDS = 100_000  # of one prompt: more is a seed that was meant
RULES = RowRules(  # those of every model; the defaults fill in what is absent, and are not written
    height=1024,
    width=1024,
    num_inference_steps=1,
    guidance_scale=0.0,
    seed=0,
    size_multiple=ModelConfig.size_multiple,
    max_pixels=INT64_MAX,
    max_side=max(MAX_SIDE.values()),
    size_policy="reject",
    allow_blank_prompts=False,
    guidance="embedded",
    negative_prompts=True,
)
Axis = list[tuple[str, dict[str, Any]]]  # what each value adds to an id, and the columns that it sets


@dataclass(frozen=True, slots=True)
class Order:
    """What to make: `sizes` are height x width; `columns` maps our names onto the file's."""

    target: Path
    source: Path | None = None  # None: the lists of the template are all there is
    template: str | None = None
    values: dict[str, list[str]] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Made:
    """What was written: `records` of the file became `rows`."""

    records: int
    rows: int
    columns: list[str]
    examples: list[dict[str, Any]]


# From words to an order.


def read_order(words: Mapping[str, str]) -> Order:
    """`from`, `to`, `template`, `values.NAME`, `columns.NAME`, `sizes`, `seeds` as typed; ConfigError for nonsense."""
    target = Path(words.get("to", "")).expanduser()
    if target.suffix != ".parquet":
        raise ConfigError(f"to must name a file that ends in .parquet, got {words.get('to', '')!r}")
    source = Path(words["from"]).expanduser() if words.get("from") else None
    if source and source.absolute() == target.absolute():
        raise ConfigError(f"to must be another file than from, got {target} for both")
    columns = {name: theirs for name, theirs in _behind("columns.", words).items() if theirs}
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"columns.{unknown[0]} must be one of {', '.join(COLUMNS)}")
    order = Order(
        target=target,
        source=source,
        template=words.get("template"),
        values={name: _list(f"values.{name}", text) for name, text in _behind("values.", words).items()},
        sizes=[_size(text) for text in _list("sizes", words["sizes"])] if "sizes" in words else [],
        seeds=_seeds(words["seeds"]) if "seeds" in words else [],
        columns=columns,
    )
    if source is None and order.template is None:
        raise ConfigError("from must name a file of prompts, or template= one with lists as values.NAME=[a,b]")
    _check_values(order)
    return order


def _behind(prefix: str, words: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(prefix): value for key, value in words.items() if key.startswith(prefix)}


def _list(key: str, text: str) -> list[str]:
    """`[a,"b, c"]`, with or without the brackets."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    values = [value.strip() for value in next(csv.reader([inner], skipinitialspace=True), [])]
    if not values or not all(values):
        raise ConfigError(f"{key} must be a list such as [a,b], without empty values, got {text!r}")
    if len(set(values)) < len(values):
        raise ConfigError(f"{key} must name each value once, got {text!r}")
    return values


def _seeds(text: str) -> list[int]:
    """A number alone is how many: 4 is 0, 1, 2, 3."""
    values = _list("seeds", text)
    if not all(re.fullmatch(r"[+-]?\d{1,20}", value) and SEED_MIN <= int(value) <= SEED_MAX for value in values):
        raise ConfigError(f"seeds must be integers from -2^63 to 2^64-1, or how many, got {text!r}")
    if "[" in text or "," in text:
        return [int(value) for value in values]
    if not 1 <= int(text) <= MAX_SEEDS:
        raise ConfigError(f"seeds must be a number from 1 to {MAX_SEEDS}, or a list such as [7,8], got {text!r}")
    return list(range(int(text)))


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not match:
        raise ConfigError(f"sizes must be height x width in pixels, such as 1024x768, got {text!r}")
    return int(match[1]), int(match[2])


def _check_values(order: Order) -> None:
    """Every list has a use: in the template, or as a column that a job reads."""
    wanted = _placeholders(order.template or "")
    for name in order.values:
        if name in ("id", "seed", "height", "width"):
            raise ConfigError(
                f"values.{name} must be left out: ids are made, seeds= and sizes= have words of their own"
            )
        if name not in wanted and name not in COLUMNS:
            raise ConfigError(f"values.{name} must be used in template as {{{name}}}, got {order.template or ''!r}")


def _placeholders(template: str) -> list[str]:
    """The names in braces. Only names: no attribute, index, format or conversion is ever looked up."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template must have its braces in pairs ({{{{ is a brace), got {template!r}") from error
    names = [name for _, name, _, _ in parts if name is not None]
    if any(spec or conversion for _, _, spec, conversion in parts) or not all(names):
        raise ConfigError(f"template must name columns as {{name}} and nothing else in braces, got {template!r}")
    return names


# From an order to rows.


def make_manifest(order: Order) -> Made:
    """Check every row, then write `order.target` at once. ManifestError names lines, and nothing is written then."""
    source = _open(order)
    checked = _Checked(source, order)
    for chunk in _chunks(source, order):
        checked.add(chunk)
    checked.refuse()
    schema = checked.schema()
    temporary = commit.temporary_sibling(order.target)
    order.target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(temporary, schema, (typed_columns(source, chunk) for chunk in _chunks(source, order)))
        open_manifest(ManifestConfig(path=str(temporary)))
        os.replace(temporary, order.target)
    except ManifestError as error:
        raise ManifestError(str(error).replace(str(temporary.absolute()), str(source.path))) from error
    finally:
        temporary.unlink(missing_ok=True)
    return Made(checked.records, checked.rows, schema.names, checked.examples)


def _open(order: Order) -> PromptFile:
    """The file under our names, with the columns that the order asks of it."""
    if order.source is None:
        source = PromptFile(Path("template"), (), lambda: iter([(1, {})]))
    else:
        source = _renamed(open_prompts(order.source), order.columns)
    sets = [*order.values, *(("height", "width") if order.sizes else ()), *(("seed",) if order.seeds else ())]
    twice = [name for name in sets if name in source.columns]
    if twice:
        word = {"height": "sizes", "width": "sizes", "seed": "seeds"}.get(twice[0], f"values.{twice[0]}")
        raise ConfigError(f"{word} must be left out where {source.path} has a column {twice[0]}")
    known = [*source.columns, *order.values]
    missing = [name for name in _placeholders(order.template or "") if name not in known]
    if missing:
        has = f"{source.path} has {', '.join(source.columns)}" if order.source else "there is no from="
        raise ConfigError(
            f"template names {{{missing[0]}}}: {has}; give it as a column or as values.{missing[0]}=[...]"
        )
    if order.template is None and "prompt" not in known:
        hint = "name the one with the prompts as columns.prompt=, or make them with template="
        raise ManifestError(f"{source.path}: no column prompt, only {', '.join(source.columns)}; {hint}")
    taken = [name for name in known if name in OUTPUT_COLUMNS]
    if taken:
        raise ManifestError(
            f"{source.path}: column {taken[0]} has the name of a column that fluxbatch writes; rename it"
        )
    return source


def _renamed(source: PromptFile, columns: Mapping[str, str]) -> PromptFile:
    missing = [f"columns.{ours}={theirs}" for ours, theirs in columns.items() if theirs not in source.columns]
    if missing:
        raise ManifestError(f"{missing[0]}: no such column; {source.path} has {', '.join(source.columns)}")
    ours = {theirs: name for name, theirs in columns.items()}
    names = [ours.get(name, name) for name in source.columns]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ManifestError(
            f"{source.path}: columns.{twice[0]} names one column, and another is called {twice[0]} already"
        )

    def records() -> Iterator[Record]:
        for number, record in source.records():
            yield number, {ours.get(name, name): value for name, value in record.items()}

    types = {ours.get(name, name): kind for name, kind in source.types.items()}
    return replace(source, columns=tuple(names), records=records, types=types)


def _chunks(source: PromptFile, order: Order) -> Iterator[list[Record]]:
    rows = _rows(source, order)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


def _rows(source: PromptFile, order: Order) -> Iterator[Record]:
    """Every record once for each combination of the lists, with a made id where it has none."""
    axes, has_ids = _axes(order), "id" in source.columns
    for index, (number, record) in enumerate(source.records()):
        base = record.get("id") if has_ids else f"row-{index:09d}"
        for combination in product(*axes):
            row = dict(record)
            for _, fields in combination:
                row |= fields
            row["id"] = _id(base, [suffix for suffix, _ in combination], alone=order.source is None)
            if order.template is not None:
                row["prompt"] = _filled(order.template, row, source.place(number))
            yield number, row


def _axes(order: Order) -> list[Axis]:
    axes: list[Axis] = [
        [(suffix, {name: value}) for suffix, value in zip(_slugs(name, values), values, strict=True)]
        for name, values in order.values.items()
    ]
    if order.sizes:
        axes.append([(f"{height}x{width}", {"height": height, "width": width}) for height, width in order.sizes])
    if order.seeds:
        axes.append([(f"s{seed}", {"seed": seed}) for seed in order.seeds])
    return axes


def _slugs(name: str, values: list[str]) -> list[str]:
    """What the values add to an id: what of them is safe in a name, or their number where that is not enough."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", value.lower())[:40].strip("-") for value in values]
    if all(slugs) and len(set(slugs)) == len(slugs):
        return slugs
    return [f"{name}{number}" for number, _ in enumerate(values, 1)]


def _id(base: Any, suffixes: list[str], *, alone: bool) -> str | None:
    if base is None or isinstance(base, bool | float | list | dict):
        return None if base is None else str(base)
    return "-".join(suffixes if alone and suffixes else [str(base), *suffixes])


def _filled(template: str, row: Mapping[str, Any], place: str) -> str:
    empty = [name for name in _placeholders(template) if row.get(name) in (None, "")]
    if empty:
        raise ManifestError(f"{place}: column {empty[0]} must not be empty, for the template names it")
    return string.Formatter().vformat(template, (), row)


# From rows to columns.


class _Checked:
    """What the first reading finds: faults with their lines, ids, types, and a few rows to show."""

    def __init__(self, source: PromptFile, order: Order) -> None:
        self.source = source
        named = {*source.columns, *order.values, "id", "prompt"}
        named |= {"height", "width"} if order.sizes else set()
        named |= {"seed"} if order.seeds else set()
        self.ours = [name for name in TYPES if name in named]
        self.extra = pa.schema([])
        self.records = self.rows = 0
        self.examples: list[dict[str, Any]] = []
        self._lines: dict[str, int] = {}  # of each id
        self._faults: list[str] = []
        self._num_faults = 0
        self._last_line = -1
        self._seeds = [0, 0]

    def add(self, chunk: list[Record]) -> None:
        table = typed_columns(self.source, chunk)
        columns = {name: table[name].combine_chunks() for name in self.ours}
        for rejection in check_rows(columns, {}, RULES, first_row=0, hashed=False).rejected:
            self._fault(chunk[rejection.row][0], rejection.message)
        self._see(chunk, table["id"].to_pylist())
        try:
            extra = table.select([name for name in table.column_names if name not in TYPES]).schema
            self.extra = pa.unify_schemas([self.extra, extra], promote_options="permissive")
        except pa.ArrowException as error:
            raise ManifestError(f"{self.source.path}: a column holds values of several types: {error}") from error
        seeds = [seed for seed in table["seed"].to_pylist() if seed is not None] if "seed" in self.ours else []
        self._seeds = [min([self._seeds[0], *map(int, seeds)]), max([self._seeds[1], *map(int, seeds)])]
        shown = table.select([*self.ours, *extra.names]).slice(0, EXAMPLES - len(self.examples)).to_pylist()
        self.examples += [{name: _plain(value) for name, value in row.items()} for row in shown]

    def _see(self, chunk: list[Record], ids: list[str | None]) -> None:
        for (number, _), row_id in zip(chunk, ids, strict=True):
            self.records += number != self._last_line
            self._last_line = number
            if row_id is not None and row_id in self._lines:
                first = f"{self.source.unit} {self._lines[row_id]}"
                self._fault(number, f"id must stand once, {row_id!r} is that of {first} too")
            elif row_id is not None:
                self._lines[row_id] = number
        self.rows += len(chunk)

    def _fault(self, number: int, message: str) -> None:
        self._num_faults += 1
        if len(self._faults) < NAMED_FAULTS:
            self._faults.append(f"{self.source.unit} {number}: {message}")

    def refuse(self) -> None:
        """ManifestError with the first faults, if there are any."""
        if self._num_faults:
            more = f"; {self._num_faults} faults in all" if self._num_faults > len(self._faults) else ""
            raise ManifestError(f"{self.source.path}: {'; '.join(self._faults)}{more}; nothing was written")
        if not self.rows:
            raise ManifestError(f"{self.source.path}: has no prompts; nothing was written")

    def schema(self) -> pa.Schema:
        """Our columns in the order of the README, then the file's own."""
        low, high = self._seeds
        seed = SEED if low < 0 and high > INT64_MAX else pa.uint64() if high > INT64_MAX else pa.int64()
        types = {**TYPES, "seed": seed}
        return pa.schema([*((name, types[name]) for name in self.ours), *self.extra])


def _plain(value: Any) -> Any:
    """As it may stand in JSON: 1024.0 is 1024."""
    if isinstance(value, Decimal) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value if isinstance(value, int | float | None) else str(value)


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with open(path, "xb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in tables:
                columns = {
                    field.name: table[field.name].cast(field.type)
                    if field.name in table.column_names
                    else pa.nulls(table.num_rows, field.type)
                    for field in schema
                }
                writer.write_table(pa.table(columns, schema=schema))
        commit.fsync_file(file)
