"""Find a manifest's files, match their columns with ours, and stream them. Knows no rule that a row must keep to.

What makes the whole manifest unusable is a `ManifestError`. Memory is that of one chunk, whatever the number of rows,
row groups or files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper

from fluxbatch.config import ManifestConfig
from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.manifest.rows import ManifestChunk, check_rows
from fluxbatch.records import RowRules

if TYPE_CHECKING:
    import datasets

CHUNK_ROWS = 32_768
CHUNK_BYTES = 32 * 2**20  # of Parquet pages, before decompression of repeated values
READ_BYTES = 2**20  # without a buffered stream, pyarrow reads a whole column chunk: 2 GB for 10 M prompts in one group
OUTPUT_COLUMNS = (  # those that fluxbatch adds
    "image", "truncated", "requested_height", "requested_width", "file_name", "image_bytes", "image_sha256",
)  # fmt: skip
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # what pandas adds to a file that it wrote with an unnamed index
CORRUPT = (pa.ArrowException, OSError)
PROMPT_FILES = (".csv", ".tsv", ".jsonl", ".txt")  # what the verb `manifest` reads


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _is_id(kind: pa.DataType) -> bool:
    return _is_text(kind) or pa.types.is_integer(kind)


COLUMNS: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "id": (_is_id, "text or integers"),
    "prompt": (_is_text, "text"),
    "negative_prompt": (_is_text, "text"),
    "height": (_is_number, "integers"),
    "width": (_is_number, "integers"),
    "num_inference_steps": (_is_number, "integers"),
    "guidance_scale": (_is_number, "numbers"),
    "seed": (_is_number, "integers"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One Parquet file or Hugging Face dataset, and how to stream chosen columns of it."""

    path: str
    stamp: str  # changes whenever the file may have changed
    schema: pa.Schema
    num_rows: int
    batches: Callable[[list[str]], Iterator[pa.RecordBatch]]

    @property
    def name(self) -> str:
        return PurePath(self.path).name


@dataclass(frozen=True, slots=True)
class Manifest:
    """An opened manifest: footers read, columns matched, no row looked at yet.

    `digest` is the SHA-256 over path, size and modification time of each file and over the choice of columns.
    """

    sources: tuple[Source, ...]
    starts: tuple[int, ...]  # the first row of each source, and after them the number of rows
    columns: dict[str, str]  # our name: the manifest's
    extra_schema: pa.Schema
    digest: str

    @property
    def files(self) -> list[str]:
        return [source.path for source in self.sources]

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @property
    def has_ids(self) -> bool:
        return all(self.columns.get("id") in source.schema.names for source in self.sources)

    def locate(self, row: int) -> str:
        """`row 12 (b.parquet, row 2)`: a row of the whole manifest in words."""
        at = bisect_right(self.starts, row, hi=len(self.sources)) - 1
        return f"row {row} ({self.sources[at].name}, row {row - self.starts[at]})"

    def chunks(self, rules: RowRules, *, hashed: bool = True) -> Iterator[ManifestChunk]:
        """Check all rows against `rules`; without `hashed` as `check_rows` says."""
        for source, first_row in zip(self.sources, self.starts, strict=False):
            for batch in self._read(source):
                columns = {
                    ours: _plain(batch[name]) for ours, name in self.columns.items() if name in batch.schema.names
                }
                yield check_rows(columns, self._extra(source, batch), rules, first_row=first_row, hashed=hashed)
                first_row += batch.num_rows

    def _read(self, source: Source) -> Iterator[pa.RecordBatch]:
        wanted = {*self.columns.values(), *self.extra_schema.names}
        try:
            yield from source.batches([name for name in source.schema.names if name in wanted])
        except CORRUPT as error:
            raise ManifestError(f"{source.path}: cannot be read to its end: {error}") from error

    def _extra(self, source: Source, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """The manifest's own columns, in the types that hold those of all files."""
        absent, extra = pa.nulls(batch.num_rows), {}
        for name, kind in zip(self.extra_schema.names, self.extra_schema.types, strict=True):
            values = _plain(batch[name]) if name in batch.schema.names else absent
            try:
                extra[name] = values.cast(kind)
            except pa.ArrowException as error:
                raise ManifestError(f"{source.path}: column {name} does not fit {kind}: {error}") from error
        return extra


# Opening: from manifest.path to sources, and from their schemas to columns.


def open_manifest(cfg: ManifestConfig) -> Manifest:
    """Find the files, read their footers and match their columns."""
    unknown = [name for name in cfg.columns if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"manifest.columns.{unknown[0]} must be one of {', '.join(COLUMNS)}")
    paths = [cfg.path] if isinstance(cfg.path, str | os.PathLike) else cfg.path
    found = {source.path: source for source in chain.from_iterable(_find(str(path)) for path in paths)}
    sources = tuple(found[path] for path in sorted(found, key=_natural))
    columns = {name: cfg.columns.get(name) or name for name in COLUMNS}
    columns = {name: theirs for name, theirs in columns.items() if theirs not in cfg.drop_columns}
    _check_mapping(sources, cfg)
    for source in sources:
        _check_columns(source, columns)
    return Manifest(
        sources=sources,
        starts=tuple(accumulate((source.num_rows for source in sources), initial=0)),
        columns=columns,
        extra_schema=_extra_schema(sources, ours=set(columns.values()), dropped=set(cfg.drop_columns)),
        digest=_digest(sources, columns, cfg.drop_columns),
    )


def _find(path: str) -> Iterator[Source]:
    try:
        sources = list(_hub_dataset(path) if path.startswith("hf://") else _walk(path))
    except (*CORRUPT, ImportError, ValueError) as error:
        raise ManifestError(f"manifest.path {path}: {error}") from error
    if not sources:
        place = "" if "://" in path else f" (from {Path.cwd()})"
        raise ManifestError(f"manifest.path {path}: no Parquet file found{place}")
    yield from sources


def _walk(path: str) -> Iterator[Source]:
    """A name that exists is taken as it is, also one with `[`, `*` or `?` in it; only then is it a pattern."""
    fs, root = _filesystem(path)
    for name in [root] if fs.exists(root) else fs.glob(root):
        if not fs.isdir(name):
            yield _parquet_file(fs, name)
        elif fs.exists(f"{name}/state.json") or fs.exists(f"{name}/dataset_dict.json"):
            yield _saved_dataset(name)
        else:
            yield from (_parquet_file(fs, file) for file in fs.find(name) if _is_manifest_file(file, below=name))


def _filesystem(path: str) -> tuple[Any, str]:
    """An fsspec file system, Arrow's own behind it where Arrow knows the scheme, and the path inside it."""
    if "://" not in path or path.startswith("file://"):
        return fsspec.filesystem("file"), str(Path(path.removeprefix("file://")).expanduser().absolute())
    try:
        fs, root = pyarrow.fs.FileSystem.from_uri(path)
        return ArrowFSWrapper(fs), root
    except pa.ArrowInvalid:
        return fsspec.core.url_to_fs(path)


def _is_manifest_file(path: str, *, below: str) -> bool:
    inner = PurePath(path).relative_to(below)
    return inner.suffix == ".parquet" and not any(part.startswith((".", "_")) for part in inner.parts)


def _parquet_file(fs: Any, path: str) -> Source:
    local = "file" in fs.protocol
    if local and not Path(path).is_file():  # a FIFO would wait for its writer for ever
        raise ManifestError(f"{path}: not a regular file")

    def open_file() -> pq.ParquetFile:
        return pq.ParquetFile(path if local else fs.open(path), pre_buffer=False, buffer_size=READ_BYTES)

    def batches(names: list[str]) -> Iterator[pa.RecordBatch]:
        with open_file() as file:
            yield from file.iter_batches(_chunk_rows(file, names), columns=names)

    try:
        with open_file() as file:
            return Source(path, _stamp(fs, path, local=local), file.schema_arrow, file.metadata.num_rows, batches)
    except CORRUPT as error:
        if PurePath(path).suffix.lower() in PROMPT_FILES:
            target = PurePath(path).with_suffix(".parquet").name
            told = f"`python -m fluxbatch manifest from={shlex.quote(path)} to={shlex.quote(target)}` makes one of it"
            raise ManifestError(f"{path}: not a Parquet file; {told}") from error
        raise ManifestError(f"{path}: not a whole Parquet file: {error}") from error


def _stamp(fs: Any, path: str, *, local: bool) -> str:
    if local:
        stat = Path(path).stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"
    info = fs.info(path)
    changed = next((info[key] for key in ("mtime", "ETag", "etag", "LastModified", "created") if info.get(key)), "")
    return f"{info['size']} {changed}"


def _chunk_rows(file: pq.ParquetFile, names: list[str]) -> int:
    """Rows that make a chunk of bounded bytes: fewer where prompts are long. Columns that nobody reads do not count."""
    metadata = file.metadata
    num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    read_bytes = max(1, int(num_bytes * _share(file, names)))
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * metadata.num_rows // read_bytes))


def _share(file: pq.ParquetFile, names: list[str]) -> float:
    """Which part of the first row group these columns are."""
    if not file.metadata.num_row_groups:
        return 1.0
    # Where the footer is damaged, asking for one column's metadata ends the process in C++ (pyarrow 26, 1 of 300
    # damaged footers), and reading it is an error like others: so read a row first.
    next(file.iter_batches(1, columns=names, row_groups=[0]), None)
    group = file.metadata.row_group(0)
    schema = file.metadata.schema
    chosen = [i for i in range(group.num_columns) if schema.column(i).path.split(".")[0] in names]
    return sum(group.column(i).total_uncompressed_size for i in chosen) / max(1, group.total_byte_size)


def _saved_dataset(path: str) -> Source:
    import datasets  # seconds to import, and seldom needed

    return _dataset(path, datasets.load_from_disk(path))


def _hub_dataset(url: str) -> Iterator[Source]:
    """`hf://datasets/owner/name@revision/path/*.parquet`, through the local cache of `datasets`."""
    import datasets

    match = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?", url)
    if not match:
        raise ManifestError(f"manifest.path must look like hf://datasets/owner/name, got {url}")
    name, revision, data_files = match.groups()
    yield _dataset(url, datasets.load_dataset(name, revision=revision, data_files=data_files))


def _dataset(path: str, dataset: datasets.Dataset | datasets.DatasetDict) -> Source:
    if isinstance(dataset, dict):
        if len(dataset) != 1:
            raise ManifestError(f"{path}: has the splits {', '.join(dataset)}; save the one that is meant by itself")
        [dataset] = dataset.values()
    stats = [Path(file["filename"]).stat() for file in dataset.cache_files]

    def batches(names: list[str]) -> Iterator[pa.RecordBatch]:
        rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES * len(dataset) // max(dataset.data.nbytes, 1)))
        for table in dataset.select_columns(names).with_format("arrow").iter(rows):
            yield from table.combine_chunks().to_batches()

    stamp = " ".join(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)
    return Source(path, stamp, dataset.features.arrow_schema, len(dataset), batches)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts `part-2` before `part-10`."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", path)]


def _digest(sources: Sequence[Source], columns: dict[str, str], dropped: Sequence[str]) -> str:
    seen = [[source.path, source.stamp] for source in sources]
    return hashlib.sha256(json.dumps([seen, sorted(columns.items()), sorted(dropped)]).encode()).hexdigest()


def _check_mapping(sources: Sequence[Source], cfg: ManifestConfig) -> None:
    names = list(dict.fromkeys(name for source in sources for name in source.schema.names))
    for name, theirs in cfg.columns.items():
        if theirs and theirs not in names:
            raise ManifestError(
                f"manifest.columns.{name}={theirs}: no such column; the manifest has {', '.join(names)}"
            )


def _check_columns(source: Source, columns: dict[str, str]) -> None:
    names = source.schema.names
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ManifestError(f"{source.path}: column {twice[0]} stands twice")
    if columns.get("prompt") not in names:
        hint = "name the one with the prompts as manifest.columns.prompt="
        raise ManifestError(
            f"{source.path}: no column {columns.get('prompt', 'prompt')}, only {', '.join(names)}; {hint}"
        )
    for name, theirs in columns.items():
        fits, words = COLUMNS[name]
        if theirs in names:
            kind = _plain_type(source.schema.field(theirs).type)
            if not (fits(kind) or pa.types.is_null(kind)):
                raise ManifestError(f"{source.path}: column {theirs} must hold {words}, its type is {kind}")


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(_plain_type(values.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, without the encodings that only a reader cares about."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _extra_schema(sources: Sequence[Source], *, ours: set[str], dropped: set[str]) -> pa.Schema:
    """The manifest's own columns, with the type that holds each of them in all files."""
    schema = pa.schema([])
    for source in sources:
        names = [
            name for name in source.schema.names if name not in ours | dropped and not PANDAS_INDEX.fullmatch(name)
        ]
        fields = [pa.field(name, _plain_type(source.schema.field(name).type)) for name in names]
        try:
            schema = pa.unify_schemas([schema, pa.schema(fields)], promote_options="permissive")
        except pa.ArrowException as error:
            hint = "cast it, or leave it out with manifest.drop_columns"
            raise ManifestError(
                f"{source.path}: a column has another type than in the files before: {error}; {hint}"
            ) from error
    for name, kind in zip(schema.names, schema.types, strict=True):
        hint = f"leave it out with manifest.drop_columns=[{name}]"
        if name in OUTPUT_COLUMNS or name in COLUMNS:
            raise ManifestError(f"column {name} has the name of a column that fluxbatch writes; {hint}, or rename it")
        if _holds_map(kind):
            raise ManifestError(
                f"column {name} must not hold maps, which `datasets` cannot open, its type is {kind}; {hint}, "
                "or cast it to a list of structs"
            )
        if _holds_nested_null(kind):
            raise ManifestError(
                f"column {name} must not hold a nested null type, its type is {kind}; {hint}, or cast it"
            )
    return schema


def _holds_nested_null(kind: pa.DataType) -> bool:
    """A list or struct field that was never filled; Arrow cannot take rows out of it again."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(pa.types.is_null(part) or _holds_nested_null(part) for part in inner)


def _holds_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_holds_map(kind.field(i).type) for i in range(kind.num_fields))
