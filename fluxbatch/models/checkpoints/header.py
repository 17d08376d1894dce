"""What stands in a safetensors file, from its first bytes alone, and its tensors one at a time.

Tensors are read, not mapped: a loader's memory is then what it holds. Knows nothing of models.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype as the file spells it, its shape, and its bytes' place in the file."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A file's tensors by key, and its metadata."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]

    def read(self, key: str) -> Tensor:
        """One tensor, on the CPU. ValueError where its dtype is unknown or the file ends too early."""
        entry = self.entries[key]
        if entry.dtype not in DTYPES:
            raise ValueError(f"{key} has the unknown dtype {entry.dtype}")
        buffer = torch.empty(entry.last - entry.first, dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(entry.first)
            _fill(file, buffer.numpy().data, key)
        return buffer.view(DTYPES[entry.dtype]).reshape(entry.shape)


def read_header(path: Path) -> Header:
    """OSError where the file cannot be read, ValueError where it is no whole safetensors file."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise ValueError("it does not begin with a safetensors header")
        content = file.read(length)
    try:
        fields = json.loads(content)
        metadata = fields.pop("__metadata__", None) or {}
        entries = {key: _entry(field, data_start=8 + length) for key, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("it does not begin with a safetensors header") from error
    needed, held = max((entry.last for entry in entries.values()), default=0), path.stat().st_size
    if needed > held:
        raise ValueError(f"it is cut off: its header promises {needed} bytes, it has {held}")
    return Header(path, entries, metadata)


def _entry(field: dict[str, Any], *, data_start: int) -> Entry:
    first, last = field["data_offsets"]
    return Entry(str(field["dtype"]), tuple(field["shape"]), data_start + first, data_start + last)


def _fill(file: Any, room: memoryview, key: str) -> None:
    while len(room):
        count = file.readinto(room)
        if not count:
            raise ValueError(f"it ends within {key}")
        room = room[count:]
