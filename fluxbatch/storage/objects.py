"""Where a run may stand: a folder, or a prefix of an object store whose paths answer as a `pathlib.Path` does.

So the readers of a run folder need not know where it is; who creates names (`commit`, `lines`, `lease`, `preflight`)
does. Knows nothing of runs.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fluxbatch.errors import ConfigError
from fluxbatch.storage.object_store import ObjectStore, Stat

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "memory")
ACCOUNT_IN_HOST = ("abfs", "abfss")  # abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/...
URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class ObjectPath:
    """The path of an object, or of a prefix, for those who would use a `pathlib.Path`."""

    store: ObjectStore
    key: str = ""

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __repr__(self) -> str:
        return f"ObjectPath({self})"

    def __truediv__(self, name: str | PurePosixPath) -> ObjectPath:
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else str(name))

    def __lt__(self, other: ObjectPath) -> bool:
        return self.key < other.key

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self.key)

    @property
    def name(self) -> str:
        return self._pure.name or PurePosixPath(self.store.url).name

    @property
    def stem(self) -> str:
        return self._pure.stem

    @property
    def suffix(self) -> str:
        return self._pure.suffix

    @property
    def parent(self) -> ObjectPath:
        parent = str(self._pure.parent)
        return ObjectPath(self.store, "" if parent == "." else parent)

    def with_name(self, name: str) -> ObjectPath:
        return ObjectPath(self.store, str(self._pure.with_name(name)))

    def relative_to(self, other: ObjectPath) -> PurePosixPath:
        return self._pure.relative_to(other.key)

    def resolve(self) -> ObjectPath:
        return self

    def stat(self) -> Stat:
        return self.store.stat(self.key)

    def lstat(self) -> Stat:
        return self.stat()

    def exists(self) -> bool:
        if not self.key:
            return self.is_dir()
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_file(self) -> bool:
        return bool(self.key) and self.exists()

    def is_dir(self) -> bool:
        """Whether anything stands under this prefix."""
        return any(self.store.children(self.key))

    def is_symlink(self) -> bool:
        return False

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """A prefix is there as soon as an object is."""

    def rmdir(self) -> None:
        """And gone with its last one."""

    def iterdir(self) -> Iterator[ObjectPath]:
        prefixes, objects = self.store.children(self.key)
        yield from (self / name for name in sorted([*prefixes, *objects]))

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Names right under this prefix."""
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def read_bytes(self) -> bytes:
        return self.store.read(self.key)

    def open(self, mode: str = "rb") -> BinaryIO:
        """For reading, from anywhere in it."""
        assert mode == "rb", "objects are written whole"
        return self.store.open(self.key)

    def unlink(self, *, missing_ok: bool = False) -> None:
        self.store.delete(self.key)

    def rename(self, target: ObjectPath) -> ObjectPath:
        self.store.move(self.key, target.key)
        return target

    def replace(self, target: ObjectPath) -> ObjectPath:
        return self.rename(target)


@cache
def _store(url: str) -> ObjectStore:
    return ObjectStore(url)  # one for a URL: what stands in memory:// is shared within the process


def as_place(text: str, *, key: str) -> Path | ObjectPath:
    """A folder, or the prefix of an object store, as the setting `key` names it. ConfigError for any other URL."""
    match = URL.fullmatch(text)
    if match is None:
        return Path(text).expanduser().absolute()
    scheme, rest = match[1], match[2]
    if scheme == "file":
        return Path("/" + rest.lstrip("/"))
    if scheme not in SCHEMES:
        raise ConfigError(f"{key} must be a folder or a URL of {', '.join(SCHEMES)}, got {scheme}://...")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    holds_user = at and (scheme not in ACCOUNT_IN_HOST or ":" in user)
    if holds_user or "?" in rest:
        raise ConfigError(f"{key} must hold no user, password or signature: credentials come from the environment")
    if not rest.strip("/") and scheme != "memory":
        raise ConfigError(f"{key} must name a bucket, got {text!r}")
    return ObjectPath(_store(text.rstrip("/")))
