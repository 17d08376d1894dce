"""Real disks that fill, turn read-only or vanish while a job writes: one sentence, nothing half, and it goes on."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Faults
from forge import Done, Forge
from small_disks import make_room, mounted, remount
from test_run import data_files, manifest, rows, settings, sound
from three_outputs import THREE_OUTPUTS

from fluxbatch.output.ledger import Ledger
from fluxbatch.storage.folder import RunFolder

COUNT = 25
# One moment of each kind of write: the probe, job.json, the plan, a batch, a shard, a ledger line, the report.
MOMENTS = ("probe:1", "publish:1", "publish:2", "publish:3", "fsync:6", "publish:10", "before_lines:1", "lines:2",
           "lines:3")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forked: Forge) -> Any:
    """The data files of an uninterrupted run, by output."""
    place = tmp_path_factory.mktemp("whole")
    manifest(place / "m.parquet", rows(COUNT))
    made: dict[str, dict[str, str]] = {}

    def of(kind: str) -> dict[str, str]:
        if kind not in made:
            assert forked(settings(place, f"output={kind}", out=kind)).returncode == 0
            made[kind] = data_files(place / kind)
        return made[kind]

    return of


def job(tmp_path: Path, kind: str, disk: Path) -> list[str]:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    overrides = settings(tmp_path, f"output={kind}")
    return [f"output.dir={disk}/run" if o.startswith("output.dir=") else o for o in overrides]


def refused(done: Done, disk: Path, words: str) -> None:
    """Exit 1, and the last word is one sentence with a path on that disk and what is missing."""
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fluxbatch: ") and str(disk) in last and words in last, done.stderr
    assert "Traceback" not in done.stderr


def nothing_half_and_nobody_blamed(disk: Path) -> None:
    """Every file under a final name is whole, and no row was marked failed because of the disk."""
    folder = RunFolder(disk / "run")
    assert not list(folder.failures.glob("*"))
    ledger = Ledger.read(folder)
    if folder.plan().exists():
        assert sound(folder.root).failed == 0
    assert all(
        (folder.root / line.file).stat().st_size == line.bytes for lines in ledger.commits.values() for line in lines
    )


def finishes(forked: Forge, overrides: list[str], disk: Path, whole: dict[str, str]) -> None:
    done = forked(overrides)
    assert done.returncode == 0, done.stderr
    assert data_files(disk / "run") == whole
    sound(disk / "run")
    assert not list((disk / "run").rglob(".tmp-*"))


def full_at(
    forked: Forge, tmp_path: Path, kind: str, moment: str, file_system: str, whole: Any, faults: Faults
) -> None:
    with mounted(tmp_path / "disk", kind=file_system, kib=4096) as disk:
        overrides = job(tmp_path, kind, disk)
        fill = f"while dd if=/dev/zero bs=64k count=1 >> {disk}/filler 2>/dev/null; do :; done"
        done = forked(overrides, DO_AT=moment, DO=fill)
        faults.disk()
        refused(done, disk, "No space left on device; make room and run the same command again")
        nothing_half_and_nobody_blamed(disk)
        assert not (disk / "run" / "_SUCCESS").exists()
        make_room(disk)
        finishes(forked, overrides, disk, whole(kind))


@pytest.mark.parametrize(
    ("kind", "moment", "file_system"),
    [
        ("parquet", "publish:3", "tmpfs"),
        ("parquet", "before_lines:1", "ext4"),
        ("webdataset", "fsync:6", "ext4"),
        ("webdataset", "probe:1", "tmpfs"),
        pytest.param("folder", "publish:10", "tmpfs", marks=pytest.mark.slow),
        pytest.param("folder", "lines:3", "ext4", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fills_while_a_job_writes(
    forked: Forge, tmp_path: Path, kind: str, moment: str, file_system: str, whole: Any, faults: Faults
) -> None:
    full_at(forked, tmp_path, kind, moment, file_system, whole, faults)


@pytest.mark.slow
@pytest.mark.parametrize("file_system", ["tmpfs", "ext4"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", THREE_OUTPUTS)
def test_a_disk_that_fills_at_each_kind_of_write(
    forked: Forge, tmp_path: Path, kind: str, moment: str, file_system: str, whole: Any, faults: Faults
) -> None:
    full_at(forked, tmp_path, kind, moment, file_system, whole, faults)


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("parquet", "publish:3"), ("webdataset", "publish:10"), pytest.param("folder", "lines:2", marks=pytest.mark.slow)],
)
def test_a_disk_that_turns_read_only_while_a_job_writes(
    forked: Forge, tmp_path: Path, kind: str, moment: str, whole: Any, faults: Faults
) -> None:
    with mounted(tmp_path / "disk", kind="ext4", kib=8192) as disk:
        overrides = job(tmp_path, kind, disk)
        done = forked(overrides, DO_AT=moment, DO=f"mount -o remount,ro {disk}")
        faults.disk()
        refused(done, disk, "Read-only file system; make it writable and run the same command again")
        remount(disk, "rw")
        nothing_half_and_nobody_blamed(disk)
        finishes(forked, overrides, disk, whole(kind))


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("parquet", "lines:1"), ("webdataset", "publish:4"), pytest.param("folder", "publish:9", marks=pytest.mark.slow)],
)
def test_a_disk_that_vanishes_while_a_job_writes(
    forked: Forge, tmp_path: Path, kind: str, moment: str, whole: Any, faults: Faults
) -> None:
    """Unmounted under the running job: nothing more is written, above all not on the bare mount point."""
    image = tmp_path / "disk.img"
    with mounted(tmp_path / "disk", kind="ext4", kib=8192) as disk:
        overrides = job(tmp_path, kind, disk)
        done = forked(overrides, DO_AT=moment, DO=f"umount -l {disk}")
        faults.disk()
        assert done.returncode == 1, done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert str(disk / "run") in last and "Traceback" not in done.stderr, done.stderr
        assert [path for path in disk.rglob("*") if path.is_file()] == []
        with mounted(tmp_path / "again", kind=f"image {image}", kib=0) as again:
            nothing_half_and_nobody_blamed(again)
            overrides = job(tmp_path, kind, again)
            finishes(forked, overrides, again, whole(kind))
