"""A run folder on an object store: the real command against a real S3 protocol, kills and races among them."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import Faults
from fake_model import FakeModel
from forge import Done, Forge, forge
from s3_server import BUCKET, s3_server
from test_run import do, manifest, rows, settings

from fluxbatch import config, process
from fluxbatch.config import TelemetryConfig
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.output import preflight
from fluxbatch.output.one_row import written_row
from fluxbatch.output.publish import publish
from fluxbatch.output.repair import repair
from fluxbatch.output.verify import verify
from fluxbatch.processes.crew_view import CrewView
from fluxbatch.reports import report
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lines import append_lines, lines_since, read_lines
from fluxbatch.storage.object_store import ObjectStore
from fluxbatch.storage.objects import ObjectPath

obstore = pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def s3() -> Iterator[pytest.MonkeyPatch]:
    with s3_server() as environ, pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture
def store(s3: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ObjectPath:
    return ObjectPath(ObjectStore(f"s3://{BUCKET}/{request.node.name}"))


def on(url: str, tmp_path: Path, *overrides: str) -> list[str]:
    return [
        *(text for text in settings(tmp_path, *overrides) if not text.startswith("output.dir=")),
        f"output.dir={url}",
    ]


def data_files(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.data.iterdir()}


def run_folder(url: str) -> RunFolder:
    return RunFolder(config.place(url, key="output.dir"))


@pytest.fixture(scope="module")
def starts(s3: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Forge]]:
    with ExitStack() as stack:
        yield [stack.enter_context(forge(tmp_path_factory.mktemp("forge"))) for _ in range(2)]


@pytest.mark.parametrize("kind", ["parquet", pytest.param("webdataset", marks=pytest.mark.slow)])
def test_a_job_on_s3_that_is_killed_and_resumed_has_the_bytes_of_one_on_a_disk(
    tmp_path: Path, starts: list[Forge], kind: str, faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    url = f"s3://{BUCKET}/nights/{kind} ü"
    start = starts[0]
    assert start(settings(tmp_path, f"output={kind}", out="disk")).returncode == 0
    overrides = on(url, tmp_path, f"output={kind}")
    for step in ("publish:6", "ledger:1"):
        assert start(overrides, KILL_AT=step).returncode == -9
        faults.kill()
    done = start(overrides)
    assert done.returncode == 0, done.stderr
    folder = run_folder(url)
    assert data_files(folder) == data_files(RunFolder(tmp_path / "disk"))
    counts, found = verify(folder, decode=True)
    assert (counts.written, counts.pending, found) == (25, 0, [])
    assert report.status(folder)["finished"] and not folder.batches.is_dir() and not folder.locks.is_dir()
    told = json.loads(folder.report_json.read_bytes())
    assert told["written"] == 25 and told["totals"]["batches"] >= 3
    assert folder.contact_sheet.stat().st_size > 0
    assert "test-secret-0451" not in "".join(
        path.read_bytes().decode(errors="ignore") for path in (folder.job, folder.report_json, folder.card)
    )


@pytest.mark.slow
def test_two_copies_that_both_believe_they_own_the_prefix_end_well_with_each_row_once(
    tmp_path: Path, starts: list[Forge], faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    assert starts[0](settings(tmp_path, out="disk")).returncode == 0
    url = f"s3://{BUCKET}/race"
    folder, done = run_folder(url), list[Done]()
    copies = [
        threading.Thread(target=lambda start=start, slow=slow: done.append(start(on(url, tmp_path), FAKE_SLOW_S=slow)))
        for start, slow in zip(starts, ("0.06", "0.01"), strict=True)
    ]
    copies[0].start()
    while not folder.batches.is_dir() and copies[0].is_alive():
        pass
    folder.lease(0).unlink(missing_ok=True)
    copies[1].start()
    for copy in copies:
        copy.join(120)
    faults.race(2)
    assert [copy.returncode for copy in done] == [0, 0], [copy.stderr for copy in done]
    assert data_files(folder) == data_files(RunFolder(tmp_path / "disk"))
    assert verify(folder, decode=False)[1] == []


def test_a_second_start_on_the_prefix_of_a_live_run_ends_with_6(tmp_path: Path, starts: list[Forge]) -> None:
    manifest(tmp_path / "m.parquet", rows(12))
    url = f"s3://{BUCKET}/busy"
    done: list[Done] = []
    first = threading.Thread(target=lambda: done.append(starts[0](on(url, tmp_path), FAKE_SLOW_S="0.2")))
    first.start()
    while not run_folder(url).lease(0).exists() and first.is_alive():
        pass
    second = starts[1](on(url, tmp_path))
    first.join(120)
    assert (second.returncode, done[0].returncode) == (6, 0)
    assert f"output.dir {url} belongs to a live run" in second.stderr


def test_a_dead_owners_lease_is_replaced_only_while_it_is_the_one_that_was_judged(store: ObjectPath) -> None:
    lease = RunFolder(store).lease(0)  # type: ignore[arg-type]
    commit.replace_file(lease, b"{}")  # type: ignore[arg-type]
    judged = lease.stat().e_tag  # type: ignore[attr-defined]
    commit.replace_file(lease, b'{"pid": 1}')  # type: ignore[arg-type]
    assert not store.store.put_if_same(str(lease.key), b"ours", judged)  # type: ignore[attr-defined]
    assert lease.read_bytes() == b'{"pid": 1}'


def test_a_name_is_created_once_and_the_first_content_stays(store: ObjectPath) -> None:
    path = store / "data" / "shard-00000.parquet"
    assert commit.publish_file(path, lambda file: file.write(b"first"))  # type: ignore[arg-type]
    assert not commit.publish_file(path, lambda file: file.write(b"other"))  # type: ignore[arg-type]
    assert path.read_bytes() == b"first"


def test_a_put_whose_answer_was_lost_counts_as_our_own(store: ObjectPath) -> None:
    path = store / "job.json"
    assert commit.publish_file(path, lambda file: file.write(b"ours"))  # type: ignore[arg-type]
    assert commit.publish_file(path, lambda file: file.write(b"ours")), "the client tried again"  # type: ignore[arg-type]


def test_a_large_file_goes_up_in_parts_and_its_name_is_still_created_once(
    store: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxbatch.storage.object_store.WHOLE_PUT_BYTES", 1000)
    path, content = store / "data" / "large", bytes(range(256)) * 40_000
    assert commit.publish_file(path, lambda file: file.write(content))  # type: ignore[arg-type]
    assert not commit.publish_file(path, lambda file: file.write(content[::-1]))  # type: ignore[arg-type]
    assert path.read_bytes() == content and [found.name for found in path.parent.iterdir()] == ["large"]
    with path.open() as file:
        file.seek(-3, 2)
        assert file.read() == content[-3:]


def test_a_store_that_creates_a_name_twice_is_refused(store: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *a, mode=None, **kw: put(*a, **kw))  # as one that ignores the header
    with pytest.raises(FluxbatchError, match="creates one name twice"):
        preflight.probe_folder(RunFolder(store))  # type: ignore[arg-type]
    assert not store.is_dir(), "the probe leaves nothing"


def test_a_bucket_that_is_not_there_is_told_in_one_sentence(tmp_path: Path, starts: list[Forge]) -> None:
    manifest(tmp_path / "m.parquet", rows(2))
    done = starts[0](on("s3://nowhere/run", tmp_path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "s3://nowhere/run" in done.stderr


def never() -> FakeModel:
    raise AssertionError("a model was loaded")


@pytest.mark.slow
def test_a_prefix_is_repaired_reused_and_looked_into_like_a_folder(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    first, second = "memory:///monday", "memory:///tuesday"
    assert do(on(first, tmp_path))[0].written == 25
    folder = run_folder(first)
    whole = data_files(folder)
    damaged = folder.data / "shard-00001.parquet"
    commit.replace_file(damaged, whole[damaged.name][:-1] + b"?")
    assert [move.file for move in repair(folder, decode=False)] == ["data/shard-00001.parquet"]
    assert do(on(first, tmp_path))[0].written == 25 and data_files(folder) == whole
    assert (folder.aside / "data" / damaged.name).exists()
    assert written_row(folder, "row 3/é").image in b"".join(whole.values())
    assert do(on(second, tmp_path, f"run.reuse_from={first}"), never)[0].written == 25
    assert data_files(run_folder(second)) == whole
    with pytest.raises(ConfigError, match="must be on a disk to be published"):
        publish(folder, repo="me/it", private=True, api=object())


def test_what_a_dead_upload_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(12))
    folder = run_folder("memory:///left")
    dead, live = (f".tmp-shard-00000.parquet-0123456789ab-{process.host()}-{pid}" for pid in (2**22 + 1, os.getpid()))
    for name in (dead, live):
        commit.replace_file(folder.data / name, b"half")
    assert do(on("memory:///left", tmp_path))[0].written == 12
    assert [path.name for path in folder.data.glob(".tmp-*")] == [live]


def test_a_supervisor_asks_an_object_store_no_more_often_than_batch_logs_appear_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, asked = run_folder("memory://watched"), list[str]()
    children = ObjectStore.children
    monkeypatch.setattr(ObjectStore, "children", lambda store, key: asked.append(key) or children(store, key))
    with CrewView(folder, TelemetryConfig(progress="off")) as view:
        for _ in range(20):
            view.look()
        assert len(asked) == 2, "at its start, and at the first look"
        view.look(last=True)
    assert len(asked) == 3


def test_ledger_lines_of_many_objects_come_in_the_order_they_were_written() -> None:
    path = run_folder("memory:///lines").ledger(0)
    for number in range(40):
        append_lines(path, [{"number": number}, {"again": number}])
    read = list(read_lines(path))
    assert [line["number"] for line in read if "number" in line] == list(range(40)) and len(read) == 80
    texts, end = lines_since(path, 38)
    assert (len(texts), end) == (4, 40)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("output=folder", "output must be parquet or webdataset where output.dir is an object store, got folder"),
        ("output.dir=ftp://host/run", "output.dir must be a folder or a URL of s3"),
        ("output.dir=s3://key:secret@bucket/run", "output.dir must hold no user, password or signature"),
        ("output.dir=abfss://key:secret@bucket/run", "output.dir must hold no user, password or signature"),
        ("output.dir=s3://", "output.dir must name a bucket"),
        ("telemetry.loggers=[tensorboard]", "telemetry.loggers must be"),
    ],
)
def test_what_an_object_store_cannot_do_is_refused_with_its_key(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        do([*on("s3://bucket/run", tmp_path), override])
    assert told in str(refused.value) and "secret" not in str(refused.value)


def test_the_container_in_an_azure_url_is_no_user() -> None:
    url = "abfss://pictures@account.dfs.core.windows.net/run"
    assert str(run_folder(url).root) == url


def test_without_obstore_the_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'fluxbatch\[objectstore\]'"):
        ObjectStore("s3://bucket/run").put("a", b"")
