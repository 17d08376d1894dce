"""The next night: what is unchanged is taken over byte for byte, the rest is drawn, and both nights can be compared."""

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import Faults
from fake_model import FakeModel
from forge import Forge, forge
from test_cli import SMALL, fluxbatch
from test_redo import Counting, edited, never_loaded
from test_run import command, data_files, do, manifest, rows, settings, sound
from three_outputs import THREE_OUTPUTS

from fluxbatch.command import run_command
from fluxbatch.errors import ConfigError
from fluxbatch.output import stored_images
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.storage.folder import RunFolder

STRIDE = 5  # of the steps at which a job is killed, an odd number: files are published in several steps each


def images(folder: Path) -> dict[str, bytes]:
    """The stored bytes of each id; one that stands twice is an error."""
    run, found = RunFolder(folder), {}
    plan = RunPlan.open(run)
    assert plan
    for lines in Ledger.read(run, plan.revisions).commits.values():
        for line in (line for line in lines if line.rows):
            for row_id, read in stored_images.open_images(folder / line.file).items():
                assert row_id not in found
                found[row_id] = read().image
    return found


def nights(tmp_path: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """The command lines of yesterday and of today."""
    today = settings(tmp_path, *overrides, f"run.reuse_from={tmp_path}/yesterday", out="today")
    return settings(tmp_path, *overrides, out="yesterday"), today


def next_night(count: int = 25) -> list[dict[str, Any]]:
    """Row 3 is changed, row 7 is gone, one is added, and every price is another."""
    content = [row for n, row in enumerate(edited(3, count=count)) if n != 7]
    content.append({"id": "new", "prompt": "new one", "height": 64, "width": 64, "price": 0.0})
    return [row | {"price": row["price"] + 100} for row in content]


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
def test_only_what_changed_is_drawn_and_the_rest_keeps_its_bytes(tmp_path: Path, kind: str) -> None:
    yesterday, today = nights(tmp_path, f"output={kind}")
    manifest(tmp_path / "m.parquet", rows(25))
    do(yesterday)
    before, old = data_files(tmp_path / "yesterday"), images(tmp_path / "yesterday")
    manifest(tmp_path / "m.parquet", next_night())
    model = Counting()
    counts, code = do(today, model)
    assert (counts.rows, counts.written, code) == (25, 25, 0)
    assert model.prompts == {"new 3", "new one"}
    new = images(tmp_path / "today")
    kept = set(old) - {"row 3/é", "row 7/é"}
    assert {row_id: new[row_id] for row_id in kept} == {row_id: old[row_id] for row_id in kept}
    assert set(new) == {row["id"] for row in next_night()} and new["row 3/é"] != old["row 3/é"]
    assert data_files(tmp_path / "yesterday") == before
    sound(tmp_path / "today")
    assert do(today, never_loaded)[1] == 0


def test_what_was_taken_over_is_what_would_have_been_drawn_with_the_new_columns(tmp_path: Path) -> None:
    yesterday, today = nights(tmp_path)
    manifest(tmp_path / "m.parquet", rows(25))
    do(yesterday)
    manifest(tmp_path / "m.parquet", next_night())
    do(today)
    do(settings(tmp_path, out="fresh"))
    loaded = [
        {row["id"]: (row["prompt"], row["price"], row["truncated"], row["image"].tobytes()) for row in
         datasets.load_dataset(str(tmp_path / out), split="train", cache_dir=str(tmp_path / f"cache-{out}"))}
        for out in ("today", "fresh")
    ]  # fmt: skip
    assert loaded[0] == loaded[1]
    assert loaded[0]["row 0/é"][1] == 100.0, "the price of today"


def test_job_and_report_say_what_became_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def seeded(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"seed": 9 if row["id"] == "row 9/é" else None} for row in content]

    yesterday, today = nights(tmp_path)
    manifest(tmp_path / "m.parquet", seeded(rows(25)))
    do(yesterday, lambda: FakeModel(nan_pixels=[9]))
    manifest(tmp_path / "m.parquet", seeded(next_night()))
    assert run_command(["plan", *today]) == 0
    said = capsys.readouterr().out
    assert f"reused: 22 images of {tmp_path}/yesterday; 1 row of it no longer in the manifest\n" in said
    assert "to render: 3 (1 changed, 1 added, 1 unwritten)\n" in said and "accepted: 25\n" in said
    assert not (tmp_path / "today").exists()
    do(today)
    counts = {"reused": 22, "changed": 1, "added": 1, "removed": 1, "unwritten": 1}
    examples = {"changed": ["row 3/é"], "added": ["new"], "removed": ["row 7/é"], "unwritten": ["row 9/é"]}
    found = {"from": str(tmp_path / "yesterday"), **counts, "examples": examples}
    assert json.loads((tmp_path / "today" / "job.json").read_text())["reuse"] == found
    assert json.loads((tmp_path / "today" / "report.json").read_text())["reuse"] == found
    assert "Since the run before" in (tmp_path / "today" / "report.html").read_text()


def test_all_unchanged_loads_no_model_and_all_changed_takes_nothing(tmp_path: Path) -> None:
    yesterday, today = nights(tmp_path)
    manifest(tmp_path / "m.parquet", rows(25))
    do(yesterday)
    counts, code = do(today, never_loaded)
    assert (counts.written, code) == (25, 0)
    assert images(tmp_path / "today") == images(tmp_path / "yesterday")
    sound(tmp_path / "today")
    manifest(tmp_path / "m.parquet", edited(*range(25)))
    model = Counting()
    assert do(settings(tmp_path, f"run.reuse_from={tmp_path}/today", out="third"), model)[0].written == 25
    assert len(model.prompts) == 25


def test_images_go_from_one_output_to_another_and_from_night_to_night(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path, "output=folder", out="0"))
    first = images(tmp_path / "0")
    for night, kind in enumerate(("webdataset", "parquet", "folder"), 1):
        do(settings(tmp_path, f"output={kind}", f"run.reuse_from={tmp_path}/{night - 1}", out=str(night)), never_loaded)
        assert images(tmp_path / str(night)) == first
        sound(tmp_path / str(night))


@pytest.mark.parametrize("order", [1, -1])
def test_a_shuffled_manifest_and_other_batch_and_shard_sizes_lose_nothing(tmp_path: Path, order: int) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    do(settings(tmp_path, out="yesterday"))
    manifest(
        tmp_path / "m.parquet", sorted(rows(40), key=lambda row: hashlib.md5(row["id"].encode()).digest())[::order]
    )
    today = [override for override in nights(tmp_path)[1] if not override.startswith("plan.")]
    do([*today, "plan.batch_size=3", "plan.shard_size=7"], never_loaded)
    assert images(tmp_path / "today") == images(tmp_path / "yesterday")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("model.dtype=bfloat16", "model.dtype must be 'float32', got 'bfloat16'"),
        ("output.image_format=webp", "output.image_format must be 'png', got 'webp'"),
        ("output.png_level=6", "output.png_level must be 1, got 6"),
        ("output.embed_parameters=false", "output.embed_parameters must be True, got False"),
    ],
)
def test_images_of_other_settings_are_refused_by_key_before_anything_is_planned(
    tmp_path: Path, setting: str, key: str
) -> None:
    yesterday, today = nights(tmp_path)
    manifest(tmp_path / "m.parquet", rows(5))
    do(yesterday)
    with pytest.raises(ConfigError) as refused:
        do([*today, setting], never_loaded)
    assert key in str(refused.value) and "run.reuse_from=" in str(refused.value)
    assert not (tmp_path / "today").exists()
    assert do([*today, "output.quality=50"], never_loaded)[1] == 0, "a PNG has no quality"


def test_a_folder_that_is_none_or_our_own_is_refused(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    for folder, said in (("none", "run.reuse_from must be a run folder"), ("run", "must be another folder than")):
        with pytest.raises(ConfigError, match=said):
            do(settings(tmp_path, f"run.reuse_from={tmp_path}/{folder}"), never_loaded)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_image_over_there_is_drawn_here(
    tmp_path: Path, kind: str, damage: Callable[[Path], object], faults: Faults
) -> None:
    yesterday, today = nights(tmp_path, f"output={kind}")
    manifest(tmp_path / "m.parquet", rows(25))
    do(yesterday)
    old = images(tmp_path / "yesterday")
    data = sorted(path for path in (tmp_path / "yesterday" / "data").rglob("*") if path.is_file())
    damage(next(path for path in data if path.suffix != ".jsonl"))
    faults.fuzz(1)
    model = Counting()
    counts, code = do(today, model)
    assert (counts.written, code) == (25, 0)
    assert 0 < len(model.prompts) <= 10, "one shard at most"
    assert images(tmp_path / "today") == old
    faults.rows(asked=old, found=images(tmp_path / "today"))
    sound(tmp_path / "today")


def test_a_night_that_vanishes_in_the_middle_is_drawn(tmp_path: Path, faults: Faults) -> None:
    yesterday, today = nights(tmp_path)
    manifest(tmp_path / "m.parquet", rows(25))
    do(yesterday)
    old = images(tmp_path / "yesterday")
    assert command(today, KILL_AT="publish:4").returncode == -signal.SIGKILL
    faults.kill()
    shutil.rmtree(tmp_path / "yesterday")
    counts, code = do(today)
    assert (counts.written, code) == (25, 0)
    assert images(tmp_path / "today") == old
    sound(tmp_path / "today")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with forge(tmp_path_factory.mktemp("forge")) as made:
        yield made


@pytest.mark.slow
def test_killed_at_steps_all_along_it_goes_on_to_the_same_images(tmp_path: Path, fast: Forge, faults: Faults) -> None:
    manifest(tmp_path / "m.parquet", rows(14))
    assert fast(settings(tmp_path, out="yesterday")).returncode == 0
    manifest(tmp_path / "m.parquet", next_night(14))
    today = [*settings(tmp_path, out="today")[:1], *settings(tmp_path)[2:], f"run.reuse_from={tmp_path}/yesterday"]
    assert fast([*today, f"output.dir={tmp_path}/whole"], STEPS_TO=str(tmp_path / "steps")).returncode == 0
    wanted = images(tmp_path / "whole")
    steps = len((tmp_path / "steps").read_text().splitlines())
    for step in range(3, steps, STRIDE):
        out = tmp_path / f"killed-{step}"
        assert fast([*today, f"output.dir={out}"], KILL_AT=f"any:{step}").returncode == -signal.SIGKILL
        faults.kill()
        done = fast([*today, f"output.dir={out}"])
        assert done.returncode == 0, done.stderr
        assert images(out) == wanted, step
        faults.rows(asked=wanted, found=images(out))
        sound(out)
        shutil.rmtree(out)


def test_ranks_take_over_their_own_shards(tmp_path: Path) -> None:
    yesterday, today = nights(tmp_path)
    manifest(tmp_path / "m.parquet", rows(40))
    do(yesterday)
    for rank in (1, 0):
        do([*today, f"run.rank={rank}", "run.world_size=2"], never_loaded)
    assert images(tmp_path / "today") == images(tmp_path / "yesterday")
    sound(tmp_path / "today")


def test_rows_that_were_drawn_again_or_retried_over_there_give_their_last_image(tmp_path: Path) -> None:
    yesterday, today = nights(tmp_path)
    content = [row | {"seed": n} for n, row in enumerate(rows(25))]
    manifest(tmp_path / "m.parquet", content)
    do(yesterday, lambda: FakeModel(nan_pixels=[3]))
    do([*yesterday, "run.retry_failed=true"])
    content[9] |= {"prompt": "edited over there"}
    manifest(tmp_path / "m.parquet", content)
    do([*yesterday, "run.on_change=redo"])
    assert do(today, never_loaded)[0].written == 25
    assert images(tmp_path / "today") == images(tmp_path / "yesterday")


@pytest.mark.slow
def test_the_embedded_model_draws_a_tenth_and_keeps_the_bytes_of_the_rest(tmp_path: Path) -> None:
    content = [{"id": f"r{n}", "prompt": f"a {colour} circle", "seed": n} for n in range(2)
               for colour in ["red", "blue", "green", "pink", "black"]]  # fmt: skip
    content = [row | {"id": f"r{n}"} for n, row in enumerate(content)]
    manifest(tmp_path / "m.parquet", content)
    base = (f"manifest.path={tmp_path}/m.parquet", *SMALL)
    assert fluxbatch(*base, f"output.dir={tmp_path}/yesterday").returncode == 0
    content[4]["prompt"] = "a white circle"
    manifest(tmp_path / "m.parquet", content)
    done = fluxbatch(*base, f"output.dir={tmp_path}/today", f"run.reuse_from={tmp_path}/yesterday")
    assert done.returncode == 0 and "9 images are taken over from" in done.stderr and "1 rows are drawn" in done.stderr
    old, new = images(tmp_path / "yesterday"), images(tmp_path / "today")
    assert {row_id for row_id in old if old[row_id] != new[row_id]} == {"r4"}
    [line] = (tmp_path / "today" / "logs" / "metrics-rank-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["rows_ok"] == 1
