"""Read a Parquet manifest as checked rows, in a stream. Knows nothing of batches, models or the run folder.

What makes the whole manifest unusable is a `ManifestError`; what is wrong with one row is a `Rejection` of that row.
Memory is that of one chunk, whatever the number of rows, row groups or files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate, chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper

from fluxbatch.config import SEED_MAX, SEED_MIN, ManifestConfig
from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.records import Rejection, RowRules

if TYPE_CHECKING:
    import datasets

CHUNK_ROWS = 32_768
CHUNK_BYTES = 32 * 2**20  # of Parquet pages, before decompression of repeated values
READ_BYTES = 2**20  # without a buffered stream, pyarrow reads a whole column chunk: 2 GB for 10 M prompts in one group
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
EXACT_FLOAT = 2**53  # beyond it a float64 no longer tells neighbouring integers apart
SEED = pa.decimal128(20, 0)  # the only Arrow type that holds -2^63 to 2^64-1
OUTPUT_COLUMNS = ("image", "truncated", "requested_height", "requested_width")  # those that fluxbatch adds
CORRUPT = (pa.ArrowException, OSError)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


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
class ManifestChunk:
    """Some thousand rows in manifest order: those to be drawn, and those refused."""

    accepted: pa.Table
    rejected: list[Rejection]


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
        """Check all rows against `rules`.

        Without `hashed` the accepted rows have no fingerprint and no derived seed: enough for counting, three times as
        fast.
        """
        for source, first_row in zip(self.sources, self.starts, strict=False):
            offset = 0
            for batch in self._read(source):
                rows = _Rows(batch, self, first_row=first_row + offset, label=source.name, offset=offset)
                accepted, rejected = rows.check(rules)
                yield ManifestChunk(_hashed(accepted, rules) if hashed else accepted, rejected)
                offset += batch.num_rows

    def _read(self, source: Source) -> Iterator[pa.RecordBatch]:
        wanted = {*self.columns.values(), *self.extra_schema.names}
        try:
            yield from source.batches([name for name in source.schema.names if name in wanted])
        except CORRUPT as error:
            raise ManifestError(f"{source.path}: cannot be read to its end: {error}") from error


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
        raise ManifestError(f"manifest.path {path}: no Parquet file found")
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

    def open_file() -> pq.ParquetFile:
        return pq.ParquetFile(path if local else fs.open(path), pre_buffer=False, buffer_size=READ_BYTES)

    def batches(names: list[str]) -> Iterator[pa.RecordBatch]:
        with open_file() as file:
            yield from file.iter_batches(_chunk_rows(file.metadata, names), columns=names)

    try:
        with open_file() as file:
            return Source(path, _stamp(fs, path, local=local), file.schema_arrow, file.metadata.num_rows, batches)
    except CORRUPT as error:
        raise ManifestError(f"{path}: not a whole Parquet file: {error}") from error


def _stamp(fs: Any, path: str, *, local: bool) -> str:
    if local:
        stat = Path(path).stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"
    info = fs.info(path)
    changed = next((info[key] for key in ("mtime", "ETag", "etag", "LastModified", "created") if info.get(key)), "")
    return f"{info['size']} {changed}"


def _chunk_rows(metadata: pq.FileMetaData, names: list[str]) -> int:
    """Rows that make a chunk of bounded bytes: fewer where prompts are long."""
    chosen = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] in names]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    num_bytes = sum(group.column(i).total_uncompressed_size for group in groups for i in chosen)
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * metadata.num_rows // max(num_bytes, 1)))


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
            kind = _plain(source.schema.field(theirs).type)
            if not (fits(kind) or pa.types.is_null(kind)):
                raise ManifestError(f"{source.path}: column {theirs} must hold {words}, its type is {kind}")


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values, without the encodings that only a reader cares about."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _extra_schema(sources: Sequence[Source], *, ours: set[str], dropped: set[str]) -> pa.Schema:
    """The manifest's own columns, with the type that holds each of them in all files."""
    schema = pa.schema([])
    for source in sources:
        fields = [pa.field(f.name, _plain(f.type)) for f in source.schema if f.name not in ours | dropped]
        try:
            schema = pa.unify_schemas([schema, pa.schema(fields)], promote_options="permissive")
        except pa.ArrowException as error:
            hint = "cast it, or leave it out with manifest.drop_columns"
            raise ManifestError(
                f"{source.path}: a column has another type than in the files before: {error}; {hint}"
            ) from error
    taken = [name for name in schema.names if name in OUTPUT_COLUMNS or name in COLUMNS]
    if taken:
        hint = f"leave it out with manifest.drop_columns=[{taken[0]}], or rename it"
        raise ManifestError(f"column {taken[0]} has the name of a column that fluxbatch writes; {hint}")
    return schema


# Checking: from a record batch to accepted rows and rejections.


class _Rows:
    """The rows of one record batch under scrutiny. The first rule that a row breaks is its rejection."""

    def __init__(self, batch: pa.RecordBatch, manifest: Manifest, *, first_row: int, label: str, offset: int) -> None:
        self.num_rows, self.first_row, self.label, self.offset = batch.num_rows, first_row, label, offset
        self.broken = np.full(batch.num_rows, -1)  # which of `rules` each row breaks
        self.rules: list[tuple[str, str, Callable[[int], str]]] = []
        self.nulls = pa.nulls(batch.num_rows)
        names = batch.schema.names
        self.raw = {
            ours: self._readable(ours, batch[theirs]) for ours, theirs in manifest.columns.items() if theirs in names
        }
        self.extra_schema = manifest.extra_schema
        self.extra = [
            self._extra(field, batch[field.name] if field.name in names else self.nulls) for field in self.extra_schema
        ]

    def check(self, rules: RowRules) -> tuple[pa.Table, list[Rejection]]:
        """The accepted rows, without fingerprints and derived seeds, and the others."""
        columns = {
            "row": pa.array(np.arange(self.first_row, self.first_row + self.num_rows)),
            "id": self._ids(),
            "prompt": self._prompts(rules),
            "negative_prompt": self._negative_prompts(rules),
            **self._sizes(rules),
            "num_inference_steps": self._steps(rules),
            "guidance_scale": self._guidance(rules),
            "seed": self._seeds(),
        }
        columns["negative_pass"] = _negative_pass(columns, rules)
        if self.extra:
            columns["extra"] = pa.StructArray.from_arrays(self.extra, fields=list(self.extra_schema))
        table = pa.table(columns)
        if not self.rules:
            return table, []
        rejected = [self._rejection(i, columns["id"][i].as_py()) for i in np.flatnonzero(self.broken >= 0).tolist()]
        return table.filter(pa.array(self.broken < 0)), rejected

    def _refuse(self, bad: np.ndarray | pa.Array, column: str, reason: str, sentence: Callable[[int], str]) -> None:
        mask = bad if isinstance(bad, np.ndarray) else bad.to_numpy(zero_copy_only=False)
        if mask.any():
            self.broken[mask & (self.broken < 0)] = len(self.rules)
            self.rules.append((column, reason, sentence))

    def _rejection(self, i: int, row_id: str | None) -> Rejection:
        column, reason, sentence = self.rules[self.broken[i]]
        message = f"{self.label}: row {self.offset + i}: {sentence(i)}"
        return Rejection(row=self.first_row + i, id=row_id, column=column, reason=reason, message=message)

    def _readable(self, name: str, values: pa.Array) -> pa.Array:
        """Plain values; text that is not UTF-8 costs its row and becomes null."""
        values = values.cast(_plain(values.type))
        invalid = _invalid_rows(values)
        if not invalid:
            return values
        place = np.arange(self.num_rows)
        mask = np.isin(place, invalid)
        self._refuse(mask, name, "invalid_utf8", lambda _: f"{name} must be UTF-8 text, has bytes that are not")
        return values.take(pa.array(place, mask=mask))

    def _extra(self, field: pa.Field, values: pa.Array) -> pa.Array:
        try:
            return self._readable(field.name, values).cast(field.type)
        except pa.ArrowException as error:
            raise ManifestError(f"{self.label}: column {field.name} does not fit {field.type}: {error}") from error

    def _ids(self) -> pa.Array:
        if "id" not in self.raw:
            rows = pa.array(np.arange(self.first_row, self.first_row + self.num_rows)).cast(pa.string())
            return pc.binary_join_element_wise("row-", pc.utf8_lpad(rows, 9, "0"), "")
        ids = self.raw["id"].cast(pa.string())
        self._refuse(ids.is_null(), "id", "null_id", lambda _: "id must not be null")
        self._refuse(_is_blank(ids), "id", "blank_id", lambda _: "id must not be blank")
        return ids

    def _prompts(self, rules: RowRules) -> pa.Array:
        prompts = self.raw["prompt"].cast(pa.string())
        self._refuse(prompts.is_null(), "prompt", "null_prompt", lambda _: "prompt must not be null")
        if not rules.allow_blank_prompts:
            sentence = "prompt must not be blank unless manifest.allow_blank_prompts=true"
            self._refuse(_is_blank(prompts), "prompt", "blank_prompt", lambda _: sentence)
        return prompts

    def _negative_prompts(self, rules: RowRules) -> pa.Array:
        prompts = self.raw.get("negative_prompt", self.nulls).cast(pa.string())
        if not rules.negative_prompts:
            sentence = "negative_prompt must be null or blank: this model runs no second pass"
            self._refuse(_is_said(prompts), "negative_prompt", "negative_prompt_unsupported", lambda _: sentence)
        return prompts

    def _sizes(self, rules: RowRules) -> dict[str, pa.Array]:
        asked_height, height = self._side("height", rules.height, rules)
        asked_width, width = self._side("width", rules.width, rules)
        self._refuse(
            height * width > rules.max_pixels, "height", "bad_size",
            lambda i: f"height x width must be <= {rules.max_pixels} pixels, got {asked_height[i]}x{asked_width[i]}",
        )  # fmt: skip
        as_asked = (height == asked_height) & (width == asked_width)
        return {
            "height": _int32(height),
            "width": _int32(width),
            "requested_height": _int32(asked_height, mask=as_asked),
            "requested_width": _int32(asked_width, mask=as_asked),
        }

    def _side(self, name: str, default: int, rules: RowRules) -> tuple[np.ndarray, np.ndarray]:
        """The side that each row asks for, and the one that it gets."""
        multiple, limit = rules.size_multiple, rules.max_side
        asked = self._whole(name, default, reason="bad_size")
        side = asked // multiple * multiple

        def refuse(bad: np.ndarray, rule: str) -> None:
            self._refuse(
                bad,
                name,
                "bad_size",
                lambda i: f"{name} must be {rule}, got {asked[i]}{_nearest(int(asked[i]), multiple)}",
            )

        refuse(side < multiple, f">= {multiple}")
        refuse(asked > limit, f"<= {limit}, which is what the image format can hold")
        if rules.size_policy == "reject":
            refuse(side != asked, f"a multiple of {multiple}")
        return asked, side

    def _steps(self, rules: RowRules) -> pa.Array:
        steps = self._whole("num_inference_steps", rules.num_inference_steps, reason="bad_steps")
        self._refuse(
            (steps < 1) | (steps > INT32_MAX), "num_inference_steps", "bad_steps",
            lambda i: f"num_inference_steps must be >= 1, got {steps[i]}",
        )  # fmt: skip
        return _int32(steps)

    def _guidance(self, rules: RowRules) -> pa.Array:
        raw = self.raw.get("guidance_scale", self.nulls)
        guidance = raw.cast(pa.float64(), safe=False).fill_null(rules.guidance_scale).to_numpy()
        self._refuse(
            ~(np.isfinite(guidance) & (guidance >= 0)), "guidance_scale", "bad_guidance",
            lambda i: f"guidance_scale must be a finite number >= 0, got {guidance[i]}",
        )  # fmt: skip
        return pa.array(guidance)

    def _seeds(self) -> pa.Array:
        """Exact seeds; null where the row names none. Integers never pass through float."""
        raw = self.raw.get("seed", self.nulls)
        if pa.types.is_decimal(raw.type):
            least, most = (pa.scalar(Decimal(limit)) for limit in (SEED_MIN, SEED_MAX))
            inside = pc.and_(pc.greater_equal(raw, least), pc.less_equal(raw, most))
            bad = pc.invert(pc.and_(inside, pc.equal(pc.floor(raw), raw)).fill_null(True))
            self._refuse(
                bad, "seed", "bad_seed", lambda i: f"seed must be an integer from -2^63 to 2^64-1, got {raw[i]}"
            )
            return pc.if_else(bad, None, raw).cast(SEED)
        if pa.types.is_floating(raw.type):
            absent = raw.is_null(nan_is_null=True)
            return pc.if_else(absent, None, pa.array(self._whole("seed", 0, reason="bad_seed"))).cast(SEED)
        return raw.cast(SEED)

    def _whole(self, name: str, default: int, *, reason: str) -> np.ndarray:
        """An integer column as int64, `default` where it is null or NaN. 1024.0 is 1024; nothing is rounded."""
        raw = self.raw.get(name, self.nulls)
        if pa.types.is_uint64(raw.type):  # what int64 cannot hold is too large for every rule anyway
            raw = pc.min_element_wise(raw, pa.scalar(INT64_MAX, pa.uint64()), skip_nulls=False)
        if not (pa.types.is_floating(raw.type) or pa.types.is_decimal(raw.type)):
            return raw.cast(pa.int64()).fill_null(default).to_numpy()
        number = raw.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        absent = np.isnan(number)
        broken = ~absent & ~((np.floor(number) == number) & (np.abs(number) <= EXACT_FLOAT))
        rule = f"{name} must be an integer (exact in a float only up to 2^53)"
        self._refuse(broken, name, reason, lambda i: f"{rule}, got {raw[i]}")
        return np.where(absent | broken, default, number).astype(np.int64)


def _invalid_rows(values: pa.Array, first: int = 0) -> list[int]:
    """Rows with text that is not UTF-8, at any depth; found by halving, so that valid columns cost one look."""
    try:
        values.validate(full=True)
        return []
    except pa.ArrowInvalid:
        if len(values) == 1:
            return [first]
    half = len(values) // 2
    low, high = (values.take(pa.array(range(a, b))) for a, b in ((0, half), (half, len(values))))
    return _invalid_rows(low, first) + _invalid_rows(high, first + half)


def _is_blank(text: pa.Array) -> pa.Array:
    return pc.or_(pc.utf8_is_space(text), pc.equal(text, "")).fill_null(False)


def _is_said(text: pa.Array) -> pa.Array:
    return pc.and_not(text.is_valid(), _is_blank(text))


def _negative_pass(columns: dict[str, pa.Array], rules: RowRules) -> pa.Array:
    """Whether a row runs the transformer twice a step."""
    if rules.guidance == "classifier_free":
        return pc.greater(columns["guidance_scale"], 1.0)
    return _is_said(columns["negative_prompt"])


def _int32(values: np.ndarray, mask: np.ndarray | None = None) -> pa.Array:
    return pa.array(np.clip(values, 0, INT32_MAX).astype(np.int32), mask=mask)  # clipped rows are refused already


def _nearest(side: int, multiple: int) -> str:
    low = side // multiple * multiple
    sizes = [low, low + multiple] if low > 0 else [multiple]
    return "" if low == side > 0 else f"; nearest {', '.join(map(str, sizes))}"


# Hashing: derived seeds and fingerprints, the only work that Python does row by row.


def _hashed(rows: pa.Table, rules: RowRules) -> pa.Table:
    """Add what a row's own text decides: its seed where it names none, and its fingerprint."""
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    columns["seed"] = _seeds_or_derived(columns["seed"], columns["id"], rules)
    digests = [hashlib.sha256(text).hexdigest() for text in _encoded(columns).to_pylist()]
    return pa.table({**columns, "fingerprint": pa.array(digests, pa.string())})


def _seeds_or_derived(seeds: pa.Array, ids: pa.Array, rules: RowRules) -> pa.Array:
    """Null seeds become the first 63 bits of sha256("<sampler.seed>:<id>")."""
    if not seeds.null_count:
        return seeds
    absent = seeds.is_null()
    texts = ids.filter(absent).to_pylist()
    digests = b"".join(hashlib.sha256(f"{rules.seed}:{row_id}".encode()).digest()[:8] for row_id in texts)
    derived = pa.array((np.frombuffer(digests, ">u8") >> 1).astype(np.int64)).cast(SEED)
    return pc.replace_with_mask(seeds, absent, derived)


def _encoded(columns: dict[str, pa.Array]) -> pa.Array:
    """Each row, except its number, as bytes that no other row content gives."""
    fields = [part for name, values in columns.items() if name not in ("row", "extra") for part in _framed(values)]
    if "extra" in columns:
        fields += _encoded_extra(columns["extra"])
    return pc.binary_join_element_wise(*fields, b"|", null_handling="replace", null_replacement=b"~")


def _encoded_extra(extra: pa.StructArray) -> list[pa.Array]:
    """By name; a null is nothing, so that a new column that says nothing leaves a row what it was."""
    named = sorted(zip(extra.type.names, extra.flatten(), strict=True), key=lambda pair: pair[0])
    heads = [f"{len(name.encode())}:{name}".encode() for name, _ in named]
    parts = [
        pc.binary_join_element_wise(head, *_framed(values), b":")
        for head, (_, values) in zip(heads, named, strict=True)
    ]
    return [pc.binary_join_element_wise(*parts, b"", null_handling="replace", null_replacement=b"")]


def _framed(values: pa.Array) -> list[pa.Array]:
    """The number of bytes of each value, and the bytes."""
    text = _as_bytes(values)
    return [pc.binary_length(text).cast(pa.string()).cast(pa.binary()), text]


def _as_bytes(values: pa.Array) -> pa.Array:
    """Exact and the same in every release: floats and times by their bits, nested values as Python writes them."""
    kind = values.type
    if _is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return values.cast(pa.binary())
    if pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        values = values.view(f"int{kind.bit_width}")
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
        texts = [value if value is None else repr(value).encode() for value in values.to_pylist()]
        return pa.array(texts, pa.binary())
    return values.cast(pa.string()).cast(pa.binary())
