"""What is committed, what is lost, and what each row's last word is."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_shards import FakePlan, commit_batches, compact, finish, output

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import shards
from fluxbatch.output.ledger import Ledger, check_files, failed_rows, row_counts
from fluxbatch.records import RowCounts, ShardCommit
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lines import read_lines

KINDS = ("parquet", "webdataset", "folder")
LINE = ShardCommit(0, "data/shard-00000.parquet", rows=2, failed=0, bytes=9, sha256="0" * 64, mtime_ns=5)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def done(folder: RunFolder, plan: FakePlan, *, kind: str = "parquet", failing: tuple[str, ...] = ()) -> Ledger:
    ledger = Ledger.read(folder)
    finish(folder, plan, ledger, cfg=output(kind), failing=failing)
    return ledger


# Lines


def test_what_was_appended_is_read_back(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b", "c"], shard_size=2)
    ledger = done(folder, plan, failing=("a",))
    assert Ledger.read(folder) == ledger
    assert all(ledger.complete(shard) for shard in plan.shards())
    [line] = list(read_lines(folder.ledger(0)))[:1]
    assert {"file", "rows", "bytes", "sha256"} <= line.keys()


def test_the_last_line_of_a_file_counts_and_all_ranks_are_read(folder: RunFolder) -> None:
    ledger = Ledger()
    ledger.append(folder, 3, [LINE])
    ledger.append(folder, 3, [replace(LINE, mtime_ns=6)])
    ledger.append(folder, 0, [replace(LINE, shard=1, file="data/shard-00001.parquet")])
    assert Ledger.read(folder).commits[0] == (replace(LINE, mtime_ns=6),)
    assert set(Ledger.read(folder).commits) == {0, 1}


def test_a_line_of_a_ledger_without_sums_is_read(folder: RunFolder) -> None:
    folder.ledgers.mkdir(parents=True)
    folder.ledger(0).write_text(json.dumps(asdict(LINE)) + "\n")
    assert Ledger.read(folder).commits == {0: (LINE,)}


def test_br35_a_torn_second_line_leaves_the_shard_open(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b"])
    done(folder, plan, failing=("a",))
    path = folder.ledger(0)
    path.write_bytes(path.read_bytes()[:-9])
    ledger = Ledger.read(folder)
    assert not ledger.complete(plan.shard(0))
    ledger.append(folder, 0, shards.adopt(folder, plan.shard(0), plan.rows(plan.shard(0)), output=output()))
    assert Ledger.read(folder).complete(plan.shard(0))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"{}\n[]\n7\nnull\n",
        json.dumps(asdict(LINE) | {"bytes": "9"}).encode() + b"\n",
        json.dumps(asdict(LINE) | {"file": "../other/data/shard-00000.parquet"}).encode() + b"\n",
        json.dumps(asdict(LINE) | {"file": "data/shard-00007.parquet"}).encode() + b"\n",
        json.dumps({"file": LINE.file, "rows": 2, "bytes": 9, "sha256": LINE.sha256}).encode() + b"\n",
    ],
)
def test_br35_an_unreadable_or_foreign_ledger_counts_for_nothing(folder: RunFolder, content: bytes) -> None:
    folder.ledgers.mkdir(parents=True)
    folder.ledger(0).write_bytes(content)
    assert Ledger.read(folder) == Ledger()
    Ledger().append(folder, 0, [LINE])
    assert Ledger.read(folder).commits == {0: (LINE,)}


def test_a_forgotten_line_stays_forgotten_until_the_file_is_made_again(folder: RunFolder) -> None:
    ledger = Ledger()
    ledger.append(folder, 3, [LINE])
    ledger.forget(folder, 0, LINE)  # another rank finds it lost
    assert ledger.commits[0] == Ledger.read(folder).commits.get(0, ()) == ()
    made_again = replace(LINE, mtime_ns=4)  # whatever the clock says
    ledger.append(folder, 0, [made_again])
    assert Ledger.read(folder).commits[0] == (made_again,)


# Damaged files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["delete", "truncate", "empty"])
def test_a_missing_or_cut_file_is_made_again_byte_for_byte(folder: RunFolder, kind: str, damage: str) -> None:
    plan = FakePlan(["a", "b", "c", "d"], shard_size=2)
    ledger = done(folder, plan, kind=kind, failing=("b",))
    before = {line.file: line.sha256 for lines in ledger.commits.values() for line in lines}
    [cut] = [line for line in ledger.commits[0] if line.rows]
    path = folder.root / cut.file
    path.unlink() if damage == "delete" else os.truncate(path, 0 if damage == "empty" else cut.bytes - 1)
    ledger = Ledger.read(folder)
    assert check_files(folder, ledger) == [cut]
    repair(folder, ledger)
    assert not folder.shard(0, kind).exists()
    assert row_counts(folder, plan, ledger).pending == 2
    ledger = done(folder, plan, kind=kind)  # and this time b would not fail
    assert {line.file: line.sha256 for lines in ledger.commits.values() for line in lines} == before
    assert check_files(folder, Ledger.read(folder)) == []


def repair(folder: RunFolder, ledger: Ledger) -> None:
    for lost in check_files(folder, ledger):
        shards.remove_shard_file(folder, lost)
        ledger.forget(folder, 0, lost)


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_folder_that_lacks_an_image_is_made_again(folder: RunFolder, damage: str) -> None:
    plan = FakePlan(["a", "b"])
    ledger = done(folder, plan, kind="folder")
    image = folder.data / "shard-00000/b.png"
    whole = image.read_bytes()
    image.unlink() if damage == "delete" else os.truncate(image, 3)
    assert check_files(folder, ledger) == list(ledger.commits[0])
    repair(folder, ledger)
    done(folder, plan, kind="folder")
    assert image.read_bytes() == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["extend", "flip"])
def test_a_longer_or_other_file_stops_the_run_with_its_name(folder: RunFolder, kind: str, damage: str) -> None:
    ledger = done(folder, FakePlan(["a", "b"]), kind=kind)
    path = folder.root / ledger.commits[0][0].file
    alter(path, damage)
    with pytest.raises(FluxbatchError, match=f"{ledger.commits[0][0].file} is not the file"):
        check_files(folder, ledger)


@pytest.mark.parametrize("damage", ["extend", "flip"])
def test_another_image_in_a_folder_stops_the_run_with_its_name(folder: RunFolder, damage: str) -> None:
    ledger = done(folder, FakePlan(["a", "b"]), kind="folder")
    alter(folder.data / "shard-00000/b.png", damage)
    with pytest.raises(FluxbatchError, match=r"b\.png is not the image"):
        check_files(folder, ledger)


def alter(path: Path, damage: str) -> None:
    content = path.read_bytes()
    path.write_bytes(content + b"x" if damage == "extend" else bytes([content[0] ^ 1]) + content[1:])
    later = path.stat().st_mtime_ns + 10**9  # two writes may share one tick of the file system's clock
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize("kind", KINDS)
def test_untouched_files_are_not_read_and_a_touched_one_is_compared(
    folder: RunFolder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = done(folder, FakePlan(["a", "b", "c"], shard_size=2), kind=kind)
    read: list[Path] = []
    honest = commit.sha256_file
    monkeypatch.setattr(commit, "sha256_file", lambda path: (read.append(path), honest(path))[1])
    assert check_files(folder, ledger) == []
    assert read == []
    touched = folder.root / ledger.commits[1][0].file
    os.utime(touched)
    assert check_files(folder, ledger) == []
    assert read == [touched]


# Rows


def test_br36_a_row_is_written_failed_or_pending(folder: RunFolder) -> None:
    ids = [f"r{i:02d}" for i in range(10)]
    plan = FakePlan(ids, shard_size=4)
    ledger = Ledger()
    assert row_counts(folder, plan, ledger) == RowCounts(10, written=0, failed=0, rejected=0, pending=10)
    commit_batches(folder, plan, 0, failing=["r01", "r03"])
    ledger.append(folder, 0, compact(folder, plan, 0, cfg=output()))
    assert row_counts(folder, plan, ledger) == RowCounts(10, written=2, failed=2, rejected=0, pending=6)
    finish(folder, plan, ledger, cfg=output())
    plan.num_rejected = 3
    counts = row_counts(folder, plan, ledger)
    assert counts == RowCounts(13, written=8, failed=2, rejected=3, pending=0)
    assert counts.balanced
    assert failed_rows(folder, ledger, plan) == {0: {"r01", "r03"}}


def test_br36_a_retry_runs_the_failed_rows_alone_and_overrules_them(folder: RunFolder) -> None:
    plan = FakePlan([f"r{i}" for i in range(6)], shard_size=3)
    ledger = done(folder, plan, failing=("r1", "r4", "r5"))
    plan.add(["r1", "r4", "r5"], kind="retry")
    assert row_counts(folder, plan, ledger) == RowCounts(6, written=3, failed=0, rejected=0, pending=3)
    assert failed_rows(folder, ledger, plan) == {}  # their last word is pending
    finish(folder, plan, ledger, cfg=output(), failing=("r5",))
    assert row_counts(folder, plan, ledger) == RowCounts(6, written=5, failed=1, rejected=0, pending=0)
    assert failed_rows(folder, ledger, plan) == {2: {"r5"}}
    plan.add(["r5"], kind="retry")
    finish(folder, plan, ledger, cfg=output())
    assert row_counts(folder, plan, ledger) == RowCounts(6, written=6, failed=0, rejected=0, pending=0)
    assert failed_rows(folder, ledger, plan) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_br38_interrupted_runs_change_no_finished_shard_and_number_them_without_gaps(
    folder: RunFolder, kind: str
) -> None:
    plan = FakePlan([f"r{i:02d}" for i in range(95)], shard_size=10)
    seen: dict[str, tuple[str, int]] = {}
    for stop_at in (3, 4, 10):
        ledger = Ledger.read(folder)
        for shard in plan.shards()[:stop_at]:
            if not ledger.complete(shard):
                commit_batches(folder, plan, shard.index)
                ledger.append(folder, 0, compact(folder, plan, shard.index, cfg=output(kind)))
        for line in (line for lines in ledger.commits.values() for line in lines):
            path = folder.root / line.file
            state = commit.sha256_file(path), path.stat().st_mtime_ns
            assert seen.setdefault(line.file, state) == state
    assert sorted(path.name for path in folder.data.iterdir()) == [folder.shard(i, kind).name for i in range(10)]
    assert row_counts(folder, plan, Ledger.read(folder)).written == 95
