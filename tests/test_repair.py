"""verify names each damage and what to do; after `verify --repair` a run makes what is missing, bytes as before."""

import functools
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Faults
from fake_model import FakeModel
from forge import Forge
from PIL import Image
from test_run import data_files, do, failing, ids_written, manifest, rows, seeded, settings, sound
from three_outputs import THREE_OUTPUTS

from fluxbatch import command
from fluxbatch.errors import FluxbatchError, FolderBusyError
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.repair import repair
from fluxbatch.output.verify import ADVICE, verify
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import Lease
from fluxbatch.storage.lines import append_lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A finished run for each output, every fifth row of it failed if so asked; made once."""

    @functools.cache
    def make(kind: str, fails_every: int) -> Path:
        place = tmp_path_factory.mktemp(kind)
        manifest(place / "m.parquet", seeded(25))
        do(settings(place, f"output={kind}"), failing(range(0, 25, fails_every)) if fails_every else FakeModel)
        return place

    return make


@pytest.fixture
def cut_run(tmp_path: Path, finished: Callable[[str, int], Path]) -> Callable[..., RunFolder]:
    """A finished run of three shards, of which the second will be damaged."""

    def copy(kind: str, *, fails_every: int = 0) -> RunFolder:
        shutil.copytree(finished(kind, fails_every), tmp_path, dirs_exist_ok=True)
        return RunFolder(tmp_path / "run")

    return copy


def data_file(folder: RunFolder, shard: int = 1) -> Path:
    [line] = [line for line in Ledger.read(folder).commits[shard] if line.rows]
    return folder.root / line.file


def rewrite(path: Path, content: bytes) -> None:
    """Other bytes under the same name and modification time: only a checksum can tell."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    rewrite(path, bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "run"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "run"),
    "extended": (lambda path: rewrite(path, path.read_bytes() + b"x"), "repair"),
    "flipped": (flip, "repair"),
}


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_file_is_named_with_what_to_do_and_made_again_byte_for_byte(
    tmp_path: Path, cut_run: Callable[..., RunFolder], kind: str, damage: str, faults: Faults
) -> None:
    folder = cut_run(kind)
    before = data_files(folder.root)
    path = data_file(folder)
    hurt, remedy = DAMAGES[damage]
    hurt(path)
    [fault] = verify(folder, decode=True)[1]
    assert (folder.root / fault.file, fault.remedy) == (path, remedy)
    assert ADVICE[remedy] in fault.message
    moves = repair(folder, decode=True)
    assert len(moves) == (remedy == "repair")
    if moves:
        counts, found = verify(folder, decode=True)
        assert (counts.pending, found) == (10, []), "exactly the shard's rows"
        assert not folder.success.exists()
    assert do(settings(tmp_path, f"output={kind}"))[1] == 0
    assert data_files(folder.root) == before
    sound(folder.root)
    faults.fuzz(1)


def test_what_is_set_aside_is_kept_under_a_name_of_its_own(tmp_path: Path, cut_run: Callable[..., RunFolder]) -> None:
    folder = cut_run("parquet")
    kept = []
    for _ in range(2):
        flip(data_file(folder))
        kept.append(data_file(folder).read_bytes()[:500])
        repair(folder, decode=True)
        do(settings(tmp_path))
    aside = folder.aside / "data"
    assert [path.name for path in sorted(aside.iterdir())] == ["shard-00001.parquet", "shard-00001.parquet.1"]
    assert [path.read_bytes()[:500] for path in sorted(aside.iterdir())] == kept


# Contents that fit their checksum


def relabelled(folder: RunFolder, path: Path) -> None:
    """The ledger line of a file that was written over, so that its checksum fits."""
    ledger = Ledger.read(folder)
    [line] = [line for line in ledger.commits[1] if line.rows]
    stat = path.stat()
    record = {
        "shard": 1, "file": line.file, "rows": line.rows, "failed": 0, "bytes": stat.st_size,
        "sha256": commit.sha256_file(path), "mtime_ns": stat.st_mtime_ns,
    }  # fmt: skip
    append_lines(folder.ledger(0), [record])


def changed_rows(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    table = pq.read_table(path, partitioning=None)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), table.schema), path)


def png(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png")
    return file.getvalue()


def with_image(image: bytes) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda table: [table[0] | {"image": {"bytes": image, "path": "x.png"}}, *table[1:]]


CONTENTS: dict[str, tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], str]] = {
    "a missing id": (lambda table: table[1:], "lacks rows of the plan"),
    "a duplicate id": (lambda table: [*table, table[0]], "twice"),
    "a foreign id": (lambda table: [table[0] | {"id": "stranger"}, *table[1:]], "'stranger'"),
    "an image that does not decode": (with_image(png(64, 64)[:-30]), "does not decode"),
    "an image that is none": (with_image(b"GIF"), "does not decode"),
    "an image of another size": (with_image(png(8, 8)), "is 8x8 where its row says"),
}


@pytest.mark.parametrize("content", list(CONTENTS))
def test_rows_and_images_that_do_not_fit_are_named_and_repaired(
    tmp_path: Path, cut_run: Callable[..., RunFolder], content: str
) -> None:
    folder = cut_run("parquet")
    before = data_files(folder.root)
    change, words = CONTENTS[content]
    changed_rows(data_file(folder), change)
    relabelled(folder, data_file(folder))
    faults = verify(folder, decode=True)[1]
    assert {fault.file for fault in faults} == {"data/shard-00001.parquet"}
    assert any(words in fault.message and ADVICE["repair"] in fault.message for fault in faults)
    assert len(repair(folder, decode=True)) == 1
    assert do(settings(tmp_path))[1] == 0
    assert data_files(folder.root) == before
    sound(folder.root)


def tar_cut_after(path: Path, members: int) -> None:
    with tarfile.open(path) as tar:
        end = tar.getmembers()[members].offset
    os.truncate(path, end)


@pytest.mark.parametrize("members", [4, 5])
@pytest.mark.parametrize("ledger", ["line stays", "line fits", "line is lost"])
def test_a_tar_cut_at_a_member_boundary_is_found_whatever_its_ledger_line_says(
    tmp_path: Path, cut_run: Callable[..., RunFolder], members: int, ledger: str
) -> None:
    folder = cut_run("webdataset")
    before = data_files(folder.root)
    path = data_file(folder)
    tar_cut_after(path, members)
    if ledger == "line fits":
        relabelled(folder, path)
    if ledger == "line is lost":
        lines = folder.ledger(0).read_bytes().splitlines(keepends=True)
        folder.ledger(0).write_bytes(b"".join(line for line in lines if b"shard-000001" not in line))
    [fault] = verify(folder, decode=False)[1]
    assert fault.file == "data/shard-000001.tar"
    assert fault.remedy == ("run" if ledger == "line stays" else "repair")
    repair(folder, decode=False)
    assert do(settings(tmp_path, "output=webdataset"))[1] == 0
    assert data_files(folder.root) == before
    sound(folder.root)


# Ledgers


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
def test_a_torn_ledger_line_is_named_with_its_shard_and_a_run_takes_the_shard_over(
    tmp_path: Path, cut_run: Callable[..., RunFolder], kind: str
) -> None:
    folder = cut_run(kind)
    before = data_files(folder.root)
    lines = folder.ledger(0).read_bytes().splitlines(keepends=True)
    folder.ledger(0).write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[2])
    [fault] = verify(folder, decode=True)[1]
    assert "ledger/rank-00000.jsonl line 2 is torn" in fault.message and ADVICE["run"] in fault.message
    assert "shard-" in fault.file
    assert repair(folder, decode=True) == []
    assert do(settings(tmp_path, f"output={kind}"))[1] == 0
    assert data_files(folder.root) == before
    sound(folder.root)


@pytest.mark.parametrize("column", ["rows", "bytes", "sha256", "mtime_ns", "crc32"])
def test_an_altered_ledger_line_blames_no_sound_shard(
    tmp_path: Path, cut_run: Callable[..., RunFolder], column: str
) -> None:
    folder = cut_run("parquet")
    before = data_files(folder.root)
    lines = [json.loads(line) for line in folder.ledger(0).read_bytes().splitlines()]
    lines[1][column] = "0" * 64 if column == "sha256" else lines[1][column] + 1
    folder.ledger(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    [fault] = verify(folder, decode=True)[1]
    assert "ledger/rank-00000.jsonl line 2 is torn or altered" in fault.message and ADVICE["run"] in fault.message
    assert repair(folder, decode=True) == []
    assert do(settings(tmp_path))[1] == 0
    assert data_files(folder.root) == before
    sound(folder.root)


def test_a_shard_that_went_with_its_ledger_line_is_missed_once_the_job_was_complete(
    tmp_path: Path, cut_run: Callable[..., RunFolder]
) -> None:
    folder = cut_run("parquet")
    data_file(folder).unlink()
    lines = folder.ledger(0).read_bytes().splitlines(keepends=True)
    folder.ledger(0).write_bytes(lines[0] + lines[2])
    counts, [fault] = verify(folder, decode=True)
    assert (counts.pending, fault.file) == (10, "_SUCCESS") and "10 rows are pending" in fault.message
    assert do(settings(tmp_path))[1] == 0
    sound(folder.root)


# Failures, strays, owners


@pytest.mark.parametrize("damage", ["extended", "flipped"])
def test_with_a_damaged_file_of_failures_its_images_go_too_for_a_row_may_fail_no_more(
    tmp_path: Path, cut_run: Callable[..., RunFolder], damage: str
) -> None:
    folder = cut_run("parquet", fails_every=5)
    [line] = [line for line in Ledger.read(folder).commits[1] if line.failed]
    DAMAGES[damage][0](folder.root / line.file)
    moves = repair(folder, decode=True)
    assert [move.file for move in moves] == ["data/shard-00001.parquet", "failed/shard-00001.parquet"]
    counts, _ = do(settings(tmp_path))
    assert (counts.written, counts.failed) == (25 - 3, 3), "the five rows of other shards stay failed"
    assert len(ids_written(folder.root)) == len(set(ids_written(folder.root))) == counts.written
    sound(folder.root)


def test_strays_are_set_aside_and_need_no_drawing(tmp_path: Path, cut_run: Callable[..., RunFolder]) -> None:
    folder = cut_run("folder")
    before = data_files(folder.root)
    (folder.data / "shard-00009").mkdir()
    (folder.data / "shard-00000" / "stray.png").write_bytes(png(8, 8))
    (folder.data / "notes.txt").write_text("mine")
    assert {fault.remedy for fault in verify(folder, decode=True)[1]} == {"aside"}
    moves = repair(folder, decode=True)
    assert (folder.aside / "data" / "notes.txt").read_text() == "mine"
    assert (folder.aside / "data" / "shard-00000" / "stray.png").exists()
    assert len(moves) == 3 or (folder.data / "shard-00009").exists()
    assert data_files(folder.root) == before
    counts, _ = verify(folder, decode=True)
    assert counts.pending == 0


def test_a_folder_with_a_live_owner_is_not_repaired(cut_run: Callable[..., RunFolder]) -> None:
    folder = cut_run("parquet")
    flip(data_file(folder))
    before = data_files(folder.root)
    with Lease(folder, rank=1, world_size=2), pytest.raises(FolderBusyError):
        repair(folder, decode=True)
    assert data_files(folder.root) == before


def test_a_damaged_plan_is_a_discrepancy_that_repair_leaves_alone(cut_run: Callable[..., RunFolder]) -> None:
    folder = cut_run("parquet")
    content = bytearray(folder.plan().read_bytes())
    content[50] ^= 255
    folder.plan().write_bytes(bytes(content))
    found = verify(folder, decode=True)[1]
    assert {(fault.file, fault.remedy) for fault in found} == {("plan.parquet", "restore")}
    assert repair(folder, decode=True) == []


def test_the_command_says_what_it_found_and_what_it_did(
    cut_run: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cut_run("parquet")
    flip(data_file(folder))
    assert command.run_command(["verify", "--repair", "--json", f"output.dir={folder.root}"]) == 5
    answer = json.loads(capsys.readouterr().out)
    assert answer["set_aside"] == [{"file": "data/shard-00001.parquet", "now": "set_aside/data/shard-00001.parquet"}]
    assert (answer["pending"], answer["discrepancies"][0]["remedy"]) == (10, "repair")
    assert command.run_command(["verify", f"output.dir={folder.root}"]) == 0
    assert "incomplete: 10 rows are pending; the same run command makes them" in capsys.readouterr().out


# Killed while repairing


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
@pytest.mark.parametrize("step", ["before_aside:1", "aside:1", "before_lines:1", "lines:1", "forgotten:1"])
def test_killed_at_a_step_of_repair_the_next_commands_end_with_the_same_bytes(
    tmp_path: Path, cut_run: Callable[..., RunFolder], forked: Forge, kind: str, step: str, faults: Faults
) -> None:
    folder = cut_run(kind)
    before = data_files(folder.root)
    flip(data_file(folder))
    assert forked(["verify.repair=true", f"output.dir={folder.root}"], "verify", KILL_AT=step).returncode == -9
    faults.kill()
    forked(["verify.repair=true", f"output.dir={folder.root}"], "verify")
    done = forked(settings(tmp_path, f"output={kind}"))
    assert done.returncode == 0, done.stderr
    assert data_files(folder.root) == before
    sound(folder.root)
    assert list(folder.root.rglob(".tmp-*")) == []


def test_a_damaged_file_without_ledger_line_is_never_taken_over(
    tmp_path: Path, cut_run: Callable[..., RunFolder]
) -> None:
    folder = cut_run("parquet")
    changed_rows(data_file(folder), lambda table: table[1:])
    folder.ledger(0).unlink()

    def never_loaded() -> FakeModel:
        raise AssertionError("refused only after drawing")

    with pytest.raises(FluxbatchError, match=r"shard-00001\.parquet holds only some rows"):
        do(settings(tmp_path), never_loaded)
    assert [move.file for move in repair(folder, decode=True)] == ["data/shard-00001.parquet"]
    assert do(settings(tmp_path))[1] == 0
    assert sorted(ids_written(folder.root)) == sorted(row["id"] for row in rows(25))
    sound(folder.root)
