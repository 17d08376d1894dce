"""Whether the output folder can hold a job, asked before any weight is loaded. Knows no plan, no ledger and no model.

A commit stands on three promises of the file system: a name is created once, a hard link is refused where a name is
taken, and fsync works. They are tried here with two temporary files, which are gone afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from fluxbatch.config import OutputConfig
from fluxbatch.errors import ConfigError, FluxbatchError, symlink_refused
from fluxbatch.output.left import Left
from fluxbatch.plan import estimate
from fluxbatch.records import Bucket
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.objects import ObjectPath
from fluxbatch.telemetry.progress import data_size

log = logging.getLogger(__name__)

PROBE_BYTES = 4096  # one block: a full disk refuses it, where an empty file might still fit
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def probe_folder(folder: RunFolder) -> None:
    """Try what each commit relies on. Raises an OSError with its path (full, read-only, over quota, forbidden).

    ConfigError for a file system without hard links, or for a symlink in the folder: nothing is ever written outside
    `output.dir`. FluxbatchError where one name can be created twice.
    """
    if isinstance(folder.root, ObjectPath):
        return _probe_store(folder.root)
    _refuse_symlinks(folder)
    folder.root.mkdir(parents=True, exist_ok=True)
    first, second = (commit.temporary_sibling(folder.root / "probe") for _ in range(2))
    try:
        _write(first)
        commit.step("probe", folder.root)
        if first.read_bytes() != bytes(PROBE_BYTES):
            raise FluxbatchError(f"{folder.root}: its file system does not tell what was written; use another one")
        _link(first, second)
        for create in (lambda: os.link(first, second), lambda: os.close(os.open(first, os.O_CREAT | os.O_EXCL))):
            _require_taken(create, folder.root)
        commit.fsync_folder(folder.root)
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink()


def _probe_store(root: ObjectPath) -> None:
    """A store must refuse to create a name twice, and must tell at once what was written."""
    probe = root / f"{commit.TEMPORARY_PREFIX}probe-{uuid.uuid4().hex[:12]}"
    try:
        if not probe.store.put_if_absent(probe.key, b"first"):
            raise FluxbatchError(f"{root}: the object store tells of a name that nobody made; use another one")
        commit.step("probe", root)
        if probe.store.put_if_absent(probe.key, b"second"):
            raise FluxbatchError(
                f"{root}: the object store creates one name twice (it ignores If-None-Match), so two live copies of a "
                "job could replace each other's data; use a newer version of it, or another one"
            )
        if probe.read_bytes() != b"first":
            raise FluxbatchError(f"{root}: the object store does not tell at once what was written; use another one")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _refuse_symlinks(folder: RunFolder) -> None:
    """Of what stands in the folder itself and one level below; deeper ones are met where they are read."""
    for place in (folder.root, *folder.own_folders()):
        for entry in os.scandir(place) if place.is_dir() else ():
            if entry.is_symlink() and not entry.name.startswith(commit.TEMPORARY_PREFIX):
                raise symlink_refused(entry.path)


def _write(path: Path) -> None:
    try:
        with open(path, "xb") as file:
            file.write(bytes(PROBE_BYTES))
            commit.fsync_file(file)
    except OSError as error:  # a failed write or fsync knows no file name
        error.filename = str(path.parent)
        raise


def _link(first: Path, second: Path) -> None:
    try:
        os.link(first, second)
    except OSError as error:
        if error.errno in NO_LINKS:
            raise ConfigError(
                f"output.dir must be on a file system with hard links, got {first.parent} ({error.strerror}); "
                "use a local disk, NFS or another POSIX file system, and copy the result"
            ) from error
        raise


def _require_taken(create: Callable[[], None], root: Path) -> None:
    try:
        create()
    except FileExistsError:
        return
    raise FluxbatchError(
        f"{root}: its file system creates one name twice, so two live copies of a job could replace each other's data; "
        "use another file system"
    )


def require_room(root: Path, left: Mapping[Bucket, Left], output: OutputConfig) -> None:
    """Refuse a disk that clearly cannot hold the images still to be made; warn where it may not.

    Raises FluxbatchError with what is free and what is needed. Sizes are rules of thumb (`estimate.BYTES_PER_PIXEL`).
    """
    if isinstance(root, ObjectPath):
        return
    images = sum(found.rows for found in left.values())
    pixels = sum(found.rows * bucket.height * bucket.width for bucket, found in left.items())
    least, likely = estimate.pixel_bytes(pixels, output.image_format)
    disk = os.statvfs(root)
    free = disk.f_bavail * disk.f_frsize
    need = f"the {images:,} images still to be made need about {data_size(likely)}, {data_size(least)} at the least"
    if disk.f_blocks and free < least:
        raise FluxbatchError(
            f"{root}: {data_size(free)} free, and {need}; make room and run the same command again, "
            "what is committed is safe"
        )
    if disk.f_blocks and free < likely:
        log.warning("%s: %s free, and %s; a full disk stops the run, and with room it goes on", root, data_size(free),
                    need)  # fmt: skip
    _require_inodes(root, disk, images if output.kind == "folder" else 0)


def _require_inodes(root: Path, disk: os.statvfs_result, files: int) -> None:
    if disk.f_files and disk.f_favail < files:
        raise FluxbatchError(
            f"{root}: {disk.f_favail:,} files can still be made there (inodes), and output=folder needs {files:,}; "
            "choose output=parquet or webdataset, or another disk"
        )
