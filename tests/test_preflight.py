"""What is asked of the output folder before a weight is loaded, and the sentence where it says no."""

import errno
import os
import threading
from pathlib import Path

import pytest
from fake_model import FakeModel
from small_disks import fill, mounted, remount
from test_run import do, manifest, rows, settings

from fluxbatch.command import _disk_sentence
from fluxbatch.config import OutputConfig
from fluxbatch.errors import ConfigError, FluxbatchError, ManifestError
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output import preflight
from fluxbatch.output.left import Left
from fluxbatch.records import Bucket
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder


def never_loaded() -> FakeModel:
    raise AssertionError("a weight was loaded")


def left(side: int, num_rows: int) -> dict[Bucket, Left]:
    return {Bucket(side, side, 1): Left(rows=num_rows, batches=1, launched=num_rows)}


def test_a_sound_folder_is_made_probed_and_left_empty(tmp_path: Path) -> None:
    preflight.probe_folder(RunFolder(tmp_path / "a" / "run"))
    assert list((tmp_path / "a" / "run").iterdir()) == []


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_read_only_disk_is_refused_before_the_model(tmp_path: Path, kind: str) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    with mounted(tmp_path / "disk", kind=kind, kib=2048) as disk:
        (disk / "run").mkdir()
        remount(disk, "ro")
        with pytest.raises(OSError) as refused:
            do(settings(tmp_path, out="disk/run"), never_loaded)
        words = _disk_sentence(refused.value)
        assert str(disk / "run") in words and "Read-only file system; make it writable" in words


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_is_refused_before_the_model_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    with mounted(tmp_path / "disk", kind=kind, kib=2048) as disk:
        (disk / "run").mkdir()
        fill(disk)
        with pytest.raises(OSError) as refused:
            do(settings(tmp_path, out="disk/run"), never_loaded)
        assert str(disk / "run") in _disk_sentence(refused.value) and "make room" in _disk_sentence(refused.value)
        assert list((disk / "run").iterdir()) == []


def test_a_disk_that_clearly_cannot_hold_the_images_is_refused_with_both_numbers(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", [row | {"height": 2048, "width": 2048} for row in rows(25)])
    with mounted(tmp_path / "disk", kind="tmpfs", kib=1024) as disk:
        with pytest.raises(
            FluxbatchError, match=r"MB free, and the 25 images .* need about 157 MB, 5.24 MB"
        ) as refused:
            do(settings(tmp_path, "model.max_pixels=4194304", out="disk/run"), never_loaded)
        assert str(disk / "run") in str(refused.value)


def test_only_what_is_still_to_be_made_needs_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = os.statvfs(tmp_path)
    least = preflight.estimate.LEAST_BYTES_PER_PIXEL["png"]
    too_many = int(free.f_bavail * free.f_frsize / least / 2**20) + 1000
    with pytest.raises(FluxbatchError, match="make room"):
        preflight.require_room(tmp_path, left(1024, too_many), OutputConfig(kind="parquet"))
    preflight.require_room(tmp_path, left(1024, 1), OutputConfig(kind="parquet"))
    assert caplog.records == []
    preflight.require_room(tmp_path, left(1024, too_many // 2), OutputConfig(kind="parquet"))
    assert "a full disk stops the run" in caplog.text


def test_a_folder_of_images_needs_as_many_inodes(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", kind="ext4", kib=4096) as disk:
        num_rows = os.statvfs(disk).f_favail + 1
        with pytest.raises(FluxbatchError, match=r"inodes.*output=parquet"):
            preflight.require_room(disk, left(16, num_rows), OutputConfig(kind="folder"))
        preflight.require_room(disk, left(16, num_rows), OutputConfig(kind="webdataset"))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preflight.os, "link", no_link)
    with pytest.raises(ConfigError, match=r"output\.dir must be on a file system with hard links"):
        preflight.probe_folder(RunFolder(tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_system_that_creates_a_name_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.link
    monkeypatch.setattr(preflight.os, "link", lambda a, b: b.exists() or honest(a, b))
    with pytest.raises(FluxbatchError, match="creates one name twice"):
        preflight.probe_folder(RunFolder(tmp_path / "run"))


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EDQUOT, "have the quota raised"), (errno.EIO, "see to the disk"), (errno.ESTALE, "see to the disk")],
)
def test_a_quota_or_a_dying_disk_at_the_probe_is_one_sentence_with_the_path(
    tmp_path: Path, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(commit, "fsync_file", refuse)
    with pytest.raises(OSError) as refused:
        preflight.probe_folder(RunFolder(tmp_path / "run"))
    assert _disk_sentence(refused.value).startswith(f"{tmp_path / 'run'}: ") and words in _disk_sentence(refused.value)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["data", "failed", "batches", "ledger", "logs", "locks", "set_aside"])
def test_a_symlink_in_place_of_a_folder_of_ours_is_refused_and_not_followed(tmp_path: Path, name: str) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name} is a symlink"):
        do(settings(tmp_path), never_loaded)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_fifo_as_manifest_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.parquet")
    refused: list[BaseException] = []

    def start() -> None:
        try:
            do(settings(tmp_path), never_loaded)
        except ManifestError as error:
            refused.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(20)
    assert refused and "m.parquet: not a regular file" in str(refused[0])


def test_a_device_in_a_manifest_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.parquet").symlink_to("/dev/zero")
    from fluxbatch.config import ManifestConfig

    with pytest.raises(ManifestError, match="not a regular file"):
        open_manifest(ManifestConfig(path=str(tmp_path / "m.parquet")))


@pytest.mark.parametrize("name", ["README.md", "report.json", "report.html", "contact_sheet.png"])
def test_what_a_finished_job_tells_is_made_again_without_a_model(tmp_path: Path, name: str) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    (tmp_path / "run" / name).unlink()
    assert do(settings(tmp_path), never_loaded)[1] == 0
    assert (tmp_path / "run" / name).stat().st_size > 0
