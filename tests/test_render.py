"""One row of a run: its image out of the files, the same image made again, and clear words where there is none."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fake_model import FakeModel
from PIL import Image
from test_cli import SMALL, fluxbatch
from test_run import data_files, do, manifest, rows, settings

from fluxbatch import run
from fluxbatch.command import run_command

KINDS = ("parquet", "webdataset", "folder")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_load_model", lambda cfg, rank: FakeModel())
    monkeypatch.setattr(run, "_check_model", lambda cfg: None)


def stored(folder: Path) -> dict[str, bytes]:
    return {row["id"]: row["image"]["bytes"] for row in pq.read_table(folder / "data").to_pylist()}


def words(verb: str, tmp_path: Path, row_id: str, *more: str) -> list[str]:
    return [verb, f"output.dir={tmp_path}/run", f"id={row_id}", *more]


@pytest.mark.parametrize("kind", KINDS)
def test_show_writes_the_stored_bytes_and_prints_the_row(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path, f"output={kind}"))
    do(settings(tmp_path, out="reference"))
    before = data_files(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for number in (0, 13, 24):
        assert run_command(words("show", tmp_path, f"row {number}/é")) == 0
        said = capsys.readouterr().out
        assert f"prompt: prompt {number}\n" in said and f"price: {number / 4}\n" in said and "seed: " in said
    images = {path.read_bytes() for path in (tmp_path / "here").iterdir()}
    wanted = stored(tmp_path / "reference")
    assert images == {wanted[f"row {number}/é"] for number in (0, 13, 24)}
    assert data_files(tmp_path / "run") == before


@pytest.mark.parametrize("kind", KINDS)
def test_render_makes_the_same_bytes_from_what_is_recorded(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tmp_path / "m.parquet", [row | {"seed": n, "guidance_scale": n / 2} for n, row in enumerate(rows(25))])
    do(settings(tmp_path, f"output={kind}"))
    for number in (0, 7, 24):
        assert run_command([*words("render", tmp_path, f"row {number}/é"), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["equal"] and answer["sha256_now"] == answer["sha256_stored"]


def test_the_launch_has_the_size_that_the_row_was_planned_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    model = FakeModel()
    monkeypatch.setattr(run, "_load_model", lambda cfg, rank: model)
    assert run_command(words("render", tmp_path, "row 24/é")) == 0
    assert set(model.rows) == {4}, "plan.batch_size=4 of the job"


def test_another_model_behind_the_same_settings_is_told_with_its_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))

    class Other(FakeModel):
        def decode(self, latents, *, bucket):  # type: ignore[no-untyped-def]
            return super().decode(latents, bucket=bucket) * 0.5

    monkeypatch.setattr(run, "_load_model", lambda cfg, rank: Other())
    again = tmp_path / "again.png"
    assert run_command([*words("render", tmp_path, "row 3/é"), f"to={again}"]) == 5
    said = capsys.readouterr().out
    assert "different: " in said and "of 255 at most" in said
    assert Image.open(io.BytesIO(again.read_bytes())).size == (64, 64)
    assert again.read_bytes() != stored(tmp_path / "run")["row 3/é"]


@pytest.mark.parametrize("verb", ["show", "render"])
def test_a_row_without_an_image_says_why(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = [row | {"seed": n} for n, row in enumerate(rows(12))]
    content[5] |= {"prompt": " "}
    manifest(tmp_path / "m.parquet", content)
    do(settings(tmp_path), lambda: FakeModel(nan_pixels=[3]))
    refusals = {
        "row 13/é": (2, "id must be one of the run's in ", "nearest ", "'row 11/é'"),
        "row 3/é": (4, "id 'row 3/é' failed in decode: non_finite:", "run.retry_failed=true"),
        "row 5/é": (4, "id 'row 5/é' was rejected (row 5, blank_prompt): prompt must not be blank", ""),
    }
    for row_id, (code, *said) in refusals.items():
        assert run_command(words(verb, tmp_path, row_id)) == code
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in said), error


@pytest.mark.parametrize("verb", ["show", "render"])
def test_a_row_of_a_shard_that_is_open_is_pending(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    with pytest.raises(RuntimeError):
        do(settings(tmp_path, "pipeline=serial"), lambda: FakeModel(fail_at={"decode": 2}))
    assert run_command(words(verb, tmp_path, "row 24/é")) == 1
    assert "id 'row 24/é' is pending: shard" in capsys.readouterr().err


def test_a_file_of_yours_is_never_written_over_and_the_name_keeps_the_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    (tmp_path / "mine.png").write_text("mine")
    show = words("show", tmp_path, "row 1/é")
    assert run_command([*show, f"to={tmp_path}/mine.png"]) == 2
    assert "stands there already with other content" in capsys.readouterr().err
    assert run_command([*show, f"to={tmp_path}/mine.jpg"]) == 2
    assert "to must end in .png" in capsys.readouterr().err
    assert [run_command([*show, f"to={tmp_path}/new.png"]) for _ in range(2)] == [0, 0], (
        "the same bytes may stand there"
    )
    assert (tmp_path / "mine.png").read_text() == "mine"


def test_words_that_are_missing_or_unknown_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["show", "id=a"], "output.dir must be given"),
        (["show", f"output.dir={tmp_path}"], "id must be given"),
        (["render", f"output.dir={tmp_path}", "id=a"], "output.dir must be a run folder"),
        (["render", f"output.dir={tmp_path}", "id=a", "sampler.seed=3"], "sampler.seed is not a word of render"),
        (["show", "id=a", "id=b"], "id must be given once"),
    ):
        assert run_command(arguments) == 2
        assert said in capsys.readouterr().err


def test_a_row_that_was_made_again_shows_its_last_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    changed = rows(25)
    changed[7] |= {"prompt": "another"}
    manifest(tmp_path / "m.parquet", changed)
    do(settings(tmp_path, "run.on_change=redo"))
    assert run_command([*words("show", tmp_path, "row 7/é"), f"to={tmp_path}/x.png"]) == 0
    assert "prompt: another" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes() == stored(tmp_path / "run")["row 7/é"]
    assert run_command(words("render", tmp_path, "row 7/é")) == 0


@pytest.mark.slow
def test_the_embedded_model_makes_its_bytes_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    content = [{"id": f"r{n}", "prompt": f"a {colour} circle"} for n, colour in enumerate(["red", "blue", "green"])]
    manifest(tmp_path / "m.parquet", content)
    out = f"output.dir={tmp_path}/run"
    assert fluxbatch(f"manifest.path={tmp_path}/m.parquet", out, *SMALL, "output=webdataset").returncode == 0
    for row_id in ("r0", "r2"):  # r2 shared its launch with a copy of itself
        again = fluxbatch("render", out, f"id={row_id}")
        assert again.returncode == 0 and "equal: the bytes are those of the run" in again.stdout, again.stderr
