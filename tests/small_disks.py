"""Real small file systems, and what may happen to them: filled, made read-only, taken away. Root alone may mount."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, *, kind: str, kib: int) -> Iterator[Path]:
    """A tmpfs, or ext4 in a loop device, of so many KiB, or an `image PATH` that was made before.

    The test is skipped where mounting is not allowed.
    """
    place.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    elif kind.startswith("image "):
        command = ["mount", "-o", "loop", kind.removeprefix("image "), str(place)]
    else:
        image = place.with_suffix(".img")
        image.write_bytes(bytes(kib * 1024))
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, text=True)
        _skip_unless(made, "making a file system")
        command = ["mount", "-o", "loop", str(image), str(place)]
    _skip_unless(subprocess.run(command, capture_output=True, text=True), f"mounting a small {kind}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], capture_output=True)


def _skip_unless(done: subprocess.CompletedProcess[str], what: str) -> None:
    if done.returncode:
        pytest.skip(f"{what} needs root and kernel support: {done.stderr.strip()}")


def fill(disk: Path) -> None:
    """Write until not one byte more fits."""
    size = 2**20
    with open(disk / "filler", "ab", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def make_room(disk: Path) -> None:
    (disk / "filler").unlink()


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True, capture_output=True)
