"""A prefix of an object store (S3, Google Cloud, Azure), through obstore: its reads and its conditional writes.

A name is created by a PUT that the store refuses where something stands (`If-None-Match: *`); that is all that commits
rely on. Credentials are those of the environment (AWS_*, GOOGLE_*, AZURE_*) or of the machine. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from fluxbatch import process
from fluxbatch.errors import ConfigError, first_line

WHOLE_PUT_BYTES = 64 * 2**20  # beyond, parts go up one by one, and the name is created by a conditional copy
READ_AHEAD_BYTES = 2**20
TOGETHER = 32  # requests


@dataclass(frozen=True, slots=True)
class Stat:
    """What `os.stat` would tell of an object."""

    st_size: int
    st_mtime_ns: int
    e_tag: str | None = None

    @property
    def st_mtime(self) -> float:
        return self.st_mtime_ns / 1e9


class ObjectStore:
    """One bucket and prefix. What its service refuses is an OSError with the name of the object."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @cached_property
    def _api(self) -> Any:
        return self._library("obstore")

    def _library(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"{self.url} needs the package obstore: pip install 'fluxbatch[objectstore]'") from error

    @cached_property
    def _store(self) -> Any:
        make = self._library("obstore.store")
        if self.url.startswith("memory:"):
            return make.MemoryStore()
        options: dict[str, Any] = {}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["client_options"] = {"allow_http": True}
        if self.url.startswith("s3"):
            options["copy_if_not_exists"] = "multipart"
        try:
            return make.from_url(self.url, **options)
        except Exception as error:
            raise ConfigError(f"{self.url} cannot be opened: {first_line(error)}") from error

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or f"{self.url}/{key}"
            raise
        except self._api.exceptions.BaseError as error:
            number = errno.EACCES if "Permission" in type(error).__name__ else errno.EIO
            raise OSError(number, first_line(error), f"{self.url}/{key}") from error

    def read(self, key: str, first: int = 0, stop: int | None = None) -> bytes:
        """An object, or bytes first..stop of it."""
        with self._named(key):
            if stop is None:
                return bytes(self._api.get(self._store, key).bytes())
            return bytes(self._api.get_range(self._store, key, start=first, end=stop)) if stop > first else b""

    def open(self, key: str) -> BinaryIO:
        """For reading, from anywhere in it."""
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, key), READ_AHEAD_BYTES))

    def stat(self, key: str) -> Stat:
        with self._named(key):
            return _stat(self._api.head(self._store, key))

    def put(self, key: str, content: bytes) -> None:
        with self._named(key):
            self._api.put(self._store, key, content)

    def put_file(self, key: str, file: Path) -> None:
        with self._named(key):
            self._api.put(self._store, key, file)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Whether the name was free; also where our own first try arrived and only its answer was lost."""
        with self._named(key):
            try:
                self._api.put(self._store, key, content, mode="create", use_multipart=False)
            except self._api.exceptions.AlreadyExistsError:
                with contextlib.suppress(FileNotFoundError):  # gone again: the next try may find the name free
                    return self.read(key) == content
                return False
        return True

    def put_file_if_absent(self, key: str, file: Path) -> bool:
        """The same for a file of any size. A large one goes up under a name of its own first."""
        if file.stat().st_size <= WHOLE_PUT_BYTES:
            return self.put_if_absent(key, file.read_bytes())
        place, owner = PurePosixPath(key), f"{process.host()}-{os.getpid()}"
        temporary = str(place.with_name(f".tmp-{place.name}-{uuid.uuid4().hex[:12]}-{owner}"))
        self.put_file(temporary, file)
        try:
            with self._named(key):
                try:
                    self._api.copy(self._store, temporary, key, overwrite=False)
                except self._api.exceptions.AlreadyExistsError:
                    return False
        finally:
            self.delete(temporary)
        return True

    def put_if_same(self, key: str, content: bytes, e_tag: str | None) -> bool:
        """Replace an object that is still the one of this ETag."""
        with self._named(key):
            try:
                self._api.put(self._store, key, content, mode={"e_tag": e_tag})
            except self._api.exceptions.PreconditionError:
                return False
        return True

    def delete(self, key: str) -> None:
        with self._named(key), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, key)

    def move(self, key: str, target: str) -> None:
        """Copy, then delete: a store has no rename."""
        with self._named(key):
            self._api.copy(self._store, key, target)
        self.delete(key)

    def children(self, key: str) -> tuple[list[str], list[str]]:
        """The names of the prefixes and of the objects right under a prefix."""
        with self._named(key):
            found = self._api.list_with_delimiter(self._store, key or None)
        return [PurePosixPath(name).name for name in found["common_prefixes"]], [
            PurePosixPath(entry["path"]).name for entry in found["objects"]
        ]

    def read_all(self, keys: list[str]) -> Iterator[bytes]:
        """Many small objects, in their order."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            yield from pool.map(self.read, keys)


def _stat(head: dict[str, Any]) -> Stat:
    modified: datetime = head["last_modified"]
    return Stat(head["size"], int(modified.timestamp() * 1e6) * 1000, head["e_tag"])


class _Ranges(io.RawIOBase):
    """An object as a file: each read asks for its bytes."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key, self._at = store, key, 0
        self._size = store.stat(key).st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._store.read(self._key, self._at, min(self._at + len(buffer), self._size))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
