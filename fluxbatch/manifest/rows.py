"""Check one chunk of manifest rows, and normalise those that keep to the rules. Knows nothing of files and formats.

A chunk comes as columns under our names, in whatever number types the manifest has. An accepted row leaves with every
default filled in, its seed exact or derived, and a fingerprint; any other is a `Rejection`, never an exception.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fluxbatch.config import SEED_MAX, SEED_MIN
from fluxbatch.records import Rejection, RowRules

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
EXACT_FLOAT = 2**53  # beyond it a float64 no longer tells neighbouring integers apart
SEED = pa.decimal128(20, 0)  # the only Arrow type that holds -2^63 to 2^64-1
BYTES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


@dataclass(frozen=True, slots=True)
class ManifestChunk:
    """Some thousand rows in manifest order: those to be drawn, and those refused."""

    accepted: pa.Table
    rejected: list[Rejection]


def check_rows(
    columns: Mapping[str, pa.Array],
    extra: Mapping[str, pa.Array],
    rules: RowRules,
    *,
    first_row: int,
    hashed: bool = True,
) -> ManifestChunk:
    """Check rows that are numbered from `first_row`, with the manifest's own columns as `extra`.

    Without `hashed` the accepted rows have no fingerprint and no derived seed: enough for counting, three times as
    fast.
    """
    accepted, rejected = _Rows(columns, extra, rules, first_row=first_row).check()
    return ManifestChunk(_hashed(accepted, rules) if hashed else accepted, rejected)


class _Rows:
    """Rows under scrutiny. The first rule that a row breaks is its rejection."""

    def __init__(
        self, columns: Mapping[str, pa.Array], extra: Mapping[str, pa.Array], rules: RowRules, *, first_row: int
    ) -> None:
        self.rules = rules
        self.row = np.arange(first_row, first_row + len(columns["prompt"]))
        self.broken = np.full(len(self.row), -1)  # which of `breaches` each row is rejected for
        self.breaches: list[tuple[str, str, Callable[[int], str]]] = []  # column, reason, message of row i
        self.nulls = pa.nulls(len(self.row))
        self.raw = {name: self._readable(name, values) for name, values in columns.items()}
        self.extra = {name: self._readable(name, values) for name, values in extra.items()}

    def check(self) -> tuple[pa.Table, list[Rejection]]:
        """The accepted rows, without fingerprints and derived seeds, and the others."""
        columns = {
            "row": pa.array(self.row),
            "id": self._ids(),
            "prompt": self._prompts(),
            "negative_prompt": self._negative_prompts(),
            **self._sizes(),
            "num_inference_steps": self._steps(),
            "guidance_scale": self._guidance(),
            "seed": self._seeds(),
        }
        columns["negative_pass"] = _negative_pass(columns, self.rules)
        columns["shared_guidance"] = self._shared_guidance(columns)
        if self.extra:
            columns["extra"] = pa.StructArray.from_arrays(list(self.extra.values()), names=list(self.extra))
        table = pa.table(columns)
        if not self.breaches:
            return table, []
        rejected = [self._rejection(i, columns["id"][i].as_py()) for i in np.flatnonzero(self.broken >= 0).tolist()]
        return table.filter(pa.array(self.broken < 0)), rejected

    def _refuse(
        self,
        bad: np.ndarray | pa.Array,
        column: str,
        reason: str,
        rule: str,
        got: Callable[[int], object] | None = None,
    ) -> None:
        """Reject the bad rows with the rule in words, and with what `got` says of row i of the chunk."""
        mask = bad if isinstance(bad, np.ndarray) else bad.to_numpy(zero_copy_only=False)
        if mask.any():
            self.broken[mask & (self.broken < 0)] = len(self.breaches)
            self.breaches.append((column, reason, lambda i: f"{rule}, got {got(i)}" if got else rule))

    def _rejection(self, i: int, row_id: str | None) -> Rejection:
        column, reason, message = self.breaches[self.broken[i]]
        return Rejection(row=int(self.row[i]), id=row_id, column=column, reason=reason, message=message(i))

    def _readable(self, name: str, values: pa.Array) -> pa.Array:
        """Text that is not UTF-8 costs its row and becomes null."""
        invalid = _invalid_rows(values)
        if not invalid:
            return values
        place = np.arange(len(values))
        mask = np.isin(place, invalid)
        self._refuse(mask, name, "invalid_utf8", f"{name} must be UTF-8 text, has bytes that are not")
        return values.take(pa.array(place, mask=mask))

    def _ids(self) -> pa.Array:
        if "id" not in self.raw:
            return pc.binary_join_element_wise("row-", pc.utf8_lpad(pa.array(self.row).cast(pa.string()), 9, "0"), "")
        ids = self.raw["id"].cast(pa.string())
        self._refuse(ids.is_null(), "id", "null_id", "id must not be null")
        self._refuse(_is_blank(ids), "id", "blank_id", "id must not be blank")
        return ids

    def _prompts(self) -> pa.Array:
        prompts = self.raw["prompt"].cast(pa.string())
        self._refuse(prompts.is_null(), "prompt", "null_prompt", "prompt must not be null")
        if not self.rules.allow_blank_prompts:
            rule = "prompt must not be blank unless manifest.allow_blank_prompts=true"
            self._refuse(_is_blank(prompts), "prompt", "blank_prompt", rule)
        return prompts

    def _negative_prompts(self) -> pa.Array:
        prompts = self.raw.get("negative_prompt", self.nulls).cast(pa.string())
        if not self.rules.negative_prompts:
            rule = "negative_prompt must be null or blank: this model runs no second pass"
            self._refuse(_is_said(prompts), "negative_prompt", "negative_prompt_unsupported", rule)
        return prompts

    def _sizes(self) -> dict[str, pa.Array]:
        asked_height, height = self._side("height", self.rules.height)
        asked_width, width = self._side("width", self.rules.width)
        rule = f"height x width must be <= {self.rules.max_pixels} pixels"
        bad = height * width > self.rules.max_pixels
        nearest = partial(_nearest_area, multiple=self.rules.size_multiple, max_pixels=self.rules.max_pixels)
        self._refuse(bad, "height", "bad_size", rule, lambda i: nearest(int(asked_height[i]), int(asked_width[i])))
        as_asked = (height == asked_height) & (width == asked_width)
        return {
            "height": _int32(height),
            "width": _int32(width),
            "requested_height": _int32(asked_height, mask=as_asked),
            "requested_width": _int32(asked_width, mask=as_asked),
        }

    def _side(self, name: str, default: int) -> tuple[np.ndarray, np.ndarray]:
        """The side that each row asks for, and the one that it gets."""
        multiple, limit = self.rules.size_multiple, self.rules.max_side
        asked = self._whole(name, default, reason="bad_size")
        side = asked // multiple * multiple

        def got(i: int) -> str:
            return f"{asked[i]}{_nearest(int(asked[i]), multiple)}"

        self._refuse(side < multiple, name, "bad_size", f"{name} must be >= {multiple}", got)
        too_long = f"{name} must be <= {limit}, which is what the image format can hold"
        self._refuse(asked > limit, name, "bad_size", too_long, got)
        if self.rules.size_policy == "reject":
            self._refuse(side != asked, name, "bad_size", f"{name} must be a multiple of {multiple}", got)
        return asked, side

    def _steps(self) -> pa.Array:
        name = "num_inference_steps"
        steps = self._whole(name, self.rules.num_inference_steps, reason="bad_steps")
        self._refuse((steps < 1) | (steps > INT32_MAX), name, "bad_steps", f"{name} must be >= 1", lambda i: steps[i])
        return _int32(steps)

    def _guidance(self) -> pa.Array:
        raw = self.raw.get("guidance_scale", self.nulls)
        if self.rules.guidance == "refused":
            rule = "guidance_scale must be null: this model takes none"
            said = raw.is_valid()
            self._refuse(said, "guidance_scale", "guidance_unsupported", rule, lambda i: raw[i])
        guidance = raw.cast(pa.float64(), safe=False).fill_null(self.rules.guidance_scale).to_numpy()
        bad = ~(np.isfinite(guidance) & (guidance >= 0))
        rule = "guidance_scale must be a finite number >= 0"
        self._refuse(bad, "guidance_scale", "bad_guidance", rule, lambda i: guidance[i])
        return pa.array(guidance)

    def _shared_guidance(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """What a row's launch must have in common with it; null where guidance is each row's own."""
        if not self.rules.shared_guidance:
            return self.nulls.cast(pa.float64())
        if self.rules.guidance == "classifier_free":
            unused = pc.and_(_is_said(columns["negative_prompt"]), pc.invert(columns["negative_pass"]))
            rule = "negative_prompt must be null or blank where guidance_scale is not above 1: this model would drop it"
            self._refuse(unused, "negative_prompt", "negative_prompt_unused", rule)
        return columns["guidance_scale"]

    def _seeds(self) -> pa.Array:
        """Exact seeds; null where the row names none. Integers never pass through float."""
        raw = self.raw.get("seed", self.nulls)
        if pa.types.is_decimal(raw.type):
            least, most = (pa.scalar(Decimal(limit)) for limit in (SEED_MIN, SEED_MAX))
            inside = pc.and_(pc.greater_equal(raw, least), pc.less_equal(raw, most))
            bad = pc.invert(pc.and_(inside, pc.equal(pc.floor(raw), raw)).fill_null(True))
            self._refuse(bad, "seed", "bad_seed", "seed must be an integer from -2^63 to 2^64-1", lambda i: raw[i])
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
        self._refuse(broken, name, reason, rule, lambda i: raw[i])
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


def _negative_pass(columns: Mapping[str, pa.Array], rules: RowRules) -> pa.Array:
    """Whether a row runs the transformer twice a step."""
    if rules.guidance == "classifier_free":
        return pc.greater(columns["guidance_scale"], 1.0)
    return _is_said(columns["negative_prompt"])


def _int32(values: np.ndarray, mask: np.ndarray | None = None) -> pa.Array:
    return pa.array(np.clip(values, 0, INT32_MAX).astype(np.int32), mask=mask)  # clipped rows are refused already


def _nearest_area(height: int, width: int, *, multiple: int, max_pixels: int) -> str:
    """A size that is too large, and one of its shape that is not."""
    scale = math.sqrt(max_pixels / (height * width))
    fitting = [max(multiple, int(side * scale) // multiple * multiple) for side in (height, width)]
    return f"{height}x{width}; nearest {fitting[0]}x{fitting[1]}"


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


DRAWING = ("id", "prompt", "negative_prompt", "height", "width", "seed", "num_inference_steps", "guidance_scale")


def drawing_digests(rows: pa.Table) -> pa.Array:
    """What each row is drawn from, in 32 hex digits: two rows of one digest have one image under equal settings.

    The manifest's own columns are no part of it, unlike a fingerprint. Takes rows as accepted, or out of a plan.
    """
    columns = {name: rows[name].combine_chunks() for name in DRAWING}
    columns["seed"] = columns["seed"].cast(SEED)
    return pa.array([hashlib.sha256(text).hexdigest()[:32] for text in _encoded(columns).to_pylist()], pa.string())


def _seeds_or_derived(seeds: pa.Array, ids: pa.Array, rules: RowRules) -> pa.Array:
    """Null seeds become the first 63 bits of sha256("<sampler.seed>:<id>")."""
    if not seeds.null_count:
        return seeds
    absent = seeds.is_null()
    texts = ids.filter(absent).to_pylist()
    digests = b"".join(hashlib.sha256(f"{rules.seed}:{row_id}".encode()).digest()[:8] for row_id in texts)
    derived = pa.array((np.frombuffer(digests, ">u8") >> 1).astype(np.int64)).cast(SEED)
    return pc.replace_with_mask(seeds, absent, derived)


def _encoded(columns: Mapping[str, pa.Array]) -> pa.Array:
    """Each row, except its number, as bytes that no other row content gives."""
    derived = ("row", "extra", "shared_guidance")
    fields = [part for name, values in columns.items() if name not in derived for part in _framed(values)]
    own = pc.binary_join_element_wise(*fields, b"|", null_handling="replace", null_replacement=b"~")
    if "extra" not in columns:
        return own
    extra = _encoded_extra(columns["extra"])
    parted = pc.if_else(pc.equal(pc.binary_length(extra), 0), b"", b"|")  # as a manifest without such columns
    return pc.binary_join_element_wise(own, parted, extra, b"")


def _encoded_extra(extra: pa.StructArray) -> pa.Array:
    """By name; a null is nothing, so that a new column that says nothing leaves a row what it was."""
    parts = []
    for name, values in sorted(zip(extra.type.names, extra.flatten(), strict=True), key=lambda pair: pair[0]):
        head = f"{len(name.encode())}:{name}".encode()
        parts.append(pc.binary_join_element_wise(head, *_framed(values), b":"))
    return pc.binary_join_element_wise(*parts, b"", null_handling="replace", null_replacement=b"")


def _framed(values: pa.Array) -> list[pa.Array]:
    """The number of bytes of each value, and the bytes."""
    text = _as_bytes(values)
    return [pc.binary_length(text).cast(pa.string()).cast(pa.binary()), text]


def _as_bytes(values: pa.Array) -> pa.Array:
    """Exact and the same in every release: floats and times by their bits, nested values as Python writes them."""
    kind = values.type
    if kind in BYTES:
        return values.cast(pa.binary())
    if pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        values = values.view(f"int{kind.bit_width}")
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
        texts = [value if value is None else repr(value).encode() for value in values.to_pylist()]
        return pa.array(texts, pa.binary())
    return values.cast(pa.string()).cast(pa.binary())
