"""Packages on disk: one file each, named by what it is for and by its key, which it holds too. Makes none."""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fluxbatch.models.aot.parts import Call, Key, Part, difference, digest, key_of

KEY = "fluxbatch"  # of the package's metadata


@dataclass(frozen=True, slots=True)
class Wanted:
    """A package that a launch needs: what it is called with, and where it stands, or would."""

    part: Part
    call: Call
    key: Key
    path: Path

    @classmethod
    def of(cls, part: Part, call: Call, *, folder: Path, device: torch.device) -> Wanted:
        key = key_of(part, call, device)
        first = "x".join(map(str, call.shapes[0].shape))
        return cls(part, call, key, folder / f"{part.name}-{first}-{digest(key)}.pt2")

    def problem(self) -> str | None:
        """Why it cannot be used; None where it can."""
        if not self.path.exists():
            return self._akin() or "not made yet"
        try:
            held = read_key(self.path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            return f"{self.path} is damaged ({str(error) or type(error).__name__})"
        return None if held == self.key else f"{self.path} is another package ({difference(self.key, held)})"

    def _akin(self) -> str | None:
        """What another package of this part and shape was made for, the newest first."""
        stem = self.path.name.removesuffix(f"-{digest(self.key)}.pt2")
        for path in sorted(self.path.parent.glob(f"{stem}-{'?' * 16}.pt2"), key=_age):
            try:
                return f"there is one for {difference(self.key, read_key(path))}"
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue
        return None

    def __str__(self) -> str:
        return f"{self.part.name} of {self.call.shapes[0]}"


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0


def read_key(path: Path) -> Key:
    """The key that a package was made with. ValueError where a byte of the file is not what it was."""
    with zipfile.ZipFile(path) as archive:
        torn = archive.testzip()
        if torn is not None:
            raise ValueError(f"checksum of {torn}")
        for name in archive.namelist():
            if name.endswith("metadata.json"):
                held = json.loads(archive.read(name)).get(KEY)
                if held is not None:
                    return json.loads(held)
    raise KeyError("no key of ours in it")


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """A name to write a file to; it takes its own name whole, over whatever stands there.

    Two processes that make the same one replace each other's, and either will do. Nobody reads one half.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
