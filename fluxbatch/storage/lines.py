"""Files that grow by whole lines: ledgers and logs. Knows not what a line says.

A write is one append; a line that a crash has torn is closed off by the next one and passed over by readers. Objects
cannot grow: there each write is an object of its own under the prefix, named by the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fluxbatch.storage import commit
from fluxbatch.storage.objects import ObjectPath


@commit.names_path
def append(path: Path, text: str, *, durable: bool) -> None:
    """Append whole lines in one write."""
    if isinstance(path, ObjectPath):
        place = path / f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}.jsonl"
        place.store.put(place.key, text.encode())
        return
    with open(path, "ab+", opener=_open_itself) as file:
        if file.tell() and not _ends_with_newline(file):
            text = "\n" + text
        file.write(text.encode())
        if durable:
            commit.fsync_file(file)


@commit.names_path
def append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Append JSON lines in one write and make them durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    created = not isinstance(path, ObjectPath) and not path.exists()
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    commit.step("before_lines", path)
    append(path, text, durable=True)
    if created:
        commit.fsync_folder(path.parent)
    commit.step("lines", path)


def _open_itself(path: str, flags: int) -> int:
    """Not what a symlink of that name points to: nothing is written outside the run folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _ends_with_newline(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole JSON objects of a JSON-lines file; a torn or foreign line is passed over."""
    for line in text_lines(path):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def text_lines(path: Path) -> Iterator[bytes]:
    """All that was appended, line by line."""
    if isinstance(path, ObjectPath):
        for content in path.store.read_all([part.key for part in path.iterdir()]):
            yield from content.splitlines()
    elif path.exists():
        with open(path, "rb") as file:
            yield from file


def end_of(path: Path) -> int:
    """Where appended lines end now, for `lines_since`: bytes, or objects."""
    return len(list(path.iterdir())) if isinstance(path, ObjectPath) else path.stat().st_size


def lines_since(path: Path, end: int) -> tuple[list[bytes], int]:
    """The whole lines appended since then, and where they end now."""
    if isinstance(path, ObjectPath):
        parts = list(path.iterdir())
        texts = [line for part in parts[end:] for line in part.read_bytes().splitlines()]
        return texts, len(parts)
    with open(path, "rb") as file:
        file.seek(end)
        whole = file.read().rpartition(b"\n")
    return whole[0].splitlines(), end + len(whole[0]) + len(whole[1])


def last_lines(path: Path, num_bytes: int) -> list[bytes]:
    """The lines in about the last `num_bytes` of what was appended; the first of them may be cut."""
    if not isinstance(path, ObjectPath):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().splitlines()
    newest: list[bytes] = []
    for part in reversed(list(path.iterdir())):
        if sum(map(len, newest)) >= num_bytes:
            break
        newest.append(part.read_bytes())
    return [line for content in reversed(newest) for line in content.splitlines()]
