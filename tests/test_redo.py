"""A job that changed underneath: refused with the list of differences, or made again just where it changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from conftest import Faults
from fake_model import FakeModel
from forge import Forge
from test_run import data_files, do, failing, ids_written, manifest, rows, seeded, settings, sound
from three_outputs import THREE_OUTPUTS

from fluxbatch.errors import ConfigError, ManifestError
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.verify import verify
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.storage.folder import RunFolder

REDO = "run.on_change=redo"


def edited(
    *numbers: int, count: int = 25, content: Callable[[int], list[dict[str, Any]]] = rows
) -> list[dict[str, Any]]:
    """The rows with another prompt at some places."""
    return [row | {"prompt": f"new {n}"} if n in numbers else row for n, row in enumerate(content(count))]


def loaded(folder: Path, cache: Path) -> dict[str, tuple[str, bytes]]:
    """Prompt and pixels of each id, as `datasets` reads the folder; an id that stands twice is an error."""
    found: dict[str, tuple[str, bytes]] = {}
    for row in datasets.load_dataset(str(folder), split="train", cache_dir=str(cache)):
        record = row.get("json", row)
        image = row.get("image") or row.get("png") or row.get("jpg")
        assert record["id"] not in found
        found[record["id"]] = (record["prompt"], image.convert("RGB").tobytes())
    return found


def never_loaded() -> FakeModel:
    raise AssertionError("nothing is to be drawn")


class Counting:
    """Models that count the rows they decode."""

    def __init__(self) -> None:
        self.models: list[FakeModel] = []

    def __call__(self) -> FakeModel:
        self.models.append(FakeModel())
        return self.models[-1]

    @property
    def prompts(self) -> set[str]:
        return {prompt for model in self.models for prompt in model.encoded if prompt}


# Refused


def test_every_edited_row_is_refused_with_its_columns(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    before = data_files(tmp_path / "run")
    changed = rows(25)
    changed[3] |= {"prompt": "x", "price": 7.0}
    changed[9] |= {"height": 96, "width": 96}
    changed[20] |= {"prompt": None}
    manifest(tmp_path / "m.parquet", changed)
    with pytest.raises(ManifestError) as refused:
        do(settings(tmp_path), never_loaded)
    words = str(refused.value)
    assert "3 planned rows were edited since" in words and "run.on_change=redo" in words
    assert "'row 3/é' (price, prompt)" in words
    assert "'row 9/é' (height, width)" in words
    assert "'row 20/é' (rejected now)" in words
    assert data_files(tmp_path / "run") == before


def test_every_other_setting_is_refused_with_old_and_new_value(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    with pytest.raises(ConfigError) as refused:
        do(settings(tmp_path, "model.dtype=bfloat16", "output.image_format=webp", "output.quality=50"), never_loaded)
    for words in ("model.dtype must be 'float32', got 'bfloat16'", "output.image_format must be 'png', got 'webp'",
                  "output.quality must be 95, got 50", "run.on_change=redo"):  # fmt: skip
        assert words in str(refused.value)


# Edited rows are made again


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
def test_edited_rows_are_made_again_and_no_others_and_each_id_loads_once(tmp_path: Path, kind: str) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    overrides = settings(tmp_path, f"output={kind}", REDO)
    do(overrides)
    manifest(tmp_path / "m.parquet", edited(0, 3, 24))
    model = Counting()
    counts, code = do(overrides, model)
    assert (counts.rows, counts.written, counts.pending, code) == (25, 25, 0, 0)
    assert model.prompts == {"new 0", "new 3", "new 24"}, "the neighbours' images are kept"
    do(settings(tmp_path, f"output={kind}", out="fresh"))
    assert loaded(tmp_path / "run", tmp_path / "c1") == loaded(tmp_path / "fresh", tmp_path / "c2")
    sound(tmp_path / "run")
    [change] = json.loads((tmp_path / "run" / "job.json").read_text())["changes"]
    assert (change["part"], change["rows"], change["settings"]) == ("plan-00001.parquet", 3, {})
    before = data_files(tmp_path / "run")
    assert do(overrides, never_loaded)[1] == 0
    assert data_files(tmp_path / "run") == before


def test_a_row_is_edited_again_and_again_among_added_and_deleted_ones(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    overrides = settings(tmp_path, REDO)
    do(overrides)
    for number in range(3):
        content = edited(2, 5, count=25 + number)
        content[2]["prompt"] += f" {number}"
        manifest(tmp_path / "m.parquet", content[1:])  # row 0 is deleted: it is kept
        counts, code = do(overrides)
        assert (counts.written, counts.rows, code) == (25 + number, 25 + number, 0)
        sound(tmp_path / "run")
    written = {row["id"]: row["prompt"] for row in pq.read_table(tmp_path / "run" / "data").to_pylist()}
    assert written == {row["id"]: row["prompt"] for row in [rows(1)[0], *content[1:]]}
    assert len(ids_written(tmp_path / "run")) == 27


def test_failed_and_retried_rows_are_edited_too(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(25))
    overrides = settings(tmp_path, REDO)
    do(overrides, failing(range(0, 25, 5)))
    do([*overrides, "run.retry_failed=true"], failing(range(0, 10, 5)))  # 0 and 5 fail again
    manifest(tmp_path / "m.parquet", edited(0, 1, 10, content=seeded))  # failed twice, written, written by the retry
    counts, code = do(overrides)
    assert (counts.rows, counts.written, counts.failed, code) == (25, 24, 1, 4)
    sound(tmp_path / "run")
    counts, code = do([*overrides, "run.retry_failed=true"])
    assert (counts.written, counts.failed, code) == (25, 0, 0)
    assert sorted(ids_written(tmp_path / "run")) == sorted(row["id"] for row in rows(25))
    sound(tmp_path / "run")


def test_an_edited_row_that_is_rejected_now_cannot_be_made_again(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    changed = rows(5)
    changed[2]["prompt"] = None
    manifest(tmp_path / "m.parquet", changed)
    with pytest.raises(ManifestError, match="row 2/é"):
        do(settings(tmp_path, REDO), never_loaded)


def test_of_many_edited_rows_one_that_is_rejected_now_stops_the_redo(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", [{"id": f"{n:02}", "prompt": "p", "height": 64, "width": 64} for n in range(25)])
    do(settings(tmp_path))
    changed = [{"id": f"{n:02}", "prompt": "q" if n < 24 else None, "height": 64, "width": 64} for n in range(25)]
    manifest(tmp_path / "m.parquet", changed)
    with pytest.raises(ManifestError, match="rejected now \\(id '24'\\)"):
        do(settings(tmp_path, REDO), never_loaded)


def test_a_row_is_edited_while_its_shard_is_open(tmp_path: Path, forked: Forge) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    forked(settings(tmp_path), KILL_AT="publish:8")
    manifest(tmp_path / "m.parquet", edited(0, 3, 24))
    assert forked(settings(tmp_path)).returncode == 3
    assert do(settings(tmp_path, REDO))[0].written == 25
    written = {row["id"]: row["prompt"] for row in pq.read_table(tmp_path / "run" / "data").to_pylist()}
    assert written == {row["id"]: row["prompt"] for row in edited(0, 3, 24)}
    assert len(ids_written(tmp_path / "run")) == 25
    sound(tmp_path / "run")


def test_a_damaged_old_shard_costs_its_rows_a_second_drawing_and_nothing_else(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    old = tmp_path / "run" / "data" / "shard-00000.parquet"
    content = bytearray(old.read_bytes())
    content[len(content) // 2] ^= 1
    old.write_bytes(content)
    changed = RunPlan.open(RunFolder(tmp_path / "run"))
    assert changed is not None
    first = changed.rows(changed.shard(0))["row"][0].as_py()
    manifest(tmp_path / "m.parquet", edited(first))
    assert do(settings(tmp_path, REDO))[0].written == 25
    sound(tmp_path / "run")


# Other settings


@pytest.mark.parametrize(
    "change", [["output.image_format=jpeg"], ["output=webdataset"], ["model.dtype=bfloat16", "output=folder"]]
)
def test_after_other_settings_all_rows_are_made_again_the_deleted_ones_too(tmp_path: Path, change: list[str]) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    manifest(tmp_path / "m.parquet", rows(20))
    counts, code = do(settings(tmp_path, REDO, *change))
    assert (counts.rows, counts.written, code) == (25, 25, 0)
    sound(tmp_path / "run")
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path, *change, out="fresh"))
    assert loaded(tmp_path / "run", tmp_path / "c1") == loaded(tmp_path / "fresh", tmp_path / "c2")
    record = json.loads((tmp_path / "run" / "job.json").read_text())
    [recorded] = record["changes"]
    assert set(recorded["settings"]) == {
        {"output": "output.kind"}.get(key, key) for key in (word.partition("=")[0] for word in change)
    }
    assert do(settings(tmp_path, *change), never_loaded)[0].written == 25, "the new settings are the job's now"
    with pytest.raises(ConfigError):
        do(settings(tmp_path), never_loaded)


def test_going_back_to_the_first_settings_is_a_second_redo(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(15))
    do(settings(tmp_path))
    do(settings(tmp_path, out="whole"))
    do(settings(tmp_path, REDO, "output.png_level=9"))
    do(settings(tmp_path, REDO))
    images = [
        {row["id"]: row["image"]["bytes"] for row in pq.read_table(tmp_path / out / "data").to_pylist()}
        for out in ("run", "whole")
    ]
    assert images[0] == images[1]
    assert len(json.loads((tmp_path / "run" / "job.json").read_text())["changes"]) == 2
    sound(tmp_path / "run")


def test_a_default_that_changed_makes_the_rows_again_that_use_it(tmp_path: Path) -> None:
    content = [{"id": f"{n}", "prompt": f"p {n}", "guidance_scale": None if n < 2 else 3.0} for n in range(6)]
    manifest(tmp_path / "m.parquet", content)
    do(settings(tmp_path, "sampler.guidance_scale=1.5"))
    with pytest.raises(ConfigError, match=r"sampler\.guidance_scale was 1\.5, is 2\.5: that changes 2 planned rows"):
        do(settings(tmp_path, "sampler.guidance_scale=2.5"), never_loaded)
    assert do(settings(tmp_path, "sampler.guidance_scale=2.5", REDO))[0].written == 6
    scales = {row["id"]: row["guidance_scale"] for row in pq.read_table(tmp_path / "run" / "data").to_pylist()}
    assert scales == {"0": 2.5, "1": 2.5, "2": 3.0, "3": 3.0, "4": 3.0, "5": 3.0}
    sound(tmp_path / "run")


def test_a_default_that_changed_is_not_blamed_for_an_edit_once_a_start_has_found_that_no_row_uses_it(
    tmp_path: Path,
) -> None:
    manifest(tmp_path / "m.parquet", [row | {"guidance_scale": 3.0} for row in rows(5)])
    do(settings(tmp_path, "sampler.guidance_scale=1.5"))
    do(settings(tmp_path, "sampler.guidance_scale=2.5"), never_loaded)
    manifest(tmp_path / "m.parquet", [row | {"guidance_scale": 3.0} for row in edited(2, count=5)])
    with pytest.raises(ManifestError, match="1 planned rows were edited"):
        do(settings(tmp_path, "sampler.guidance_scale=2.5"), never_loaded)


@pytest.mark.slow
def test_ranks_redo_their_shares(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(45))
    do(settings(tmp_path))
    manifest(tmp_path / "m.parquet", edited(*range(0, 45, 4), count=45))
    for rank in (2, 0, 1):
        do(settings(tmp_path, REDO, f"run.rank={rank}", "run.world_size=3"))
    assert (tmp_path / "run" / "_SUCCESS").exists()
    written = pq.read_table(tmp_path / "run" / "data").to_pylist()
    assert sorted(row["prompt"] for row in written) == sorted(r["prompt"] for r in edited(*range(0, 45, 4), count=45))
    sound(tmp_path / "run")


# Killed


def steps_of(forked: Forge, overrides: list[str], told: Path) -> list[str]:
    """Each commit step of a run, as `step:N`."""
    assert forked(overrides, STEPS_TO=str(told)).returncode == 0
    return [f"any:{number + 1}" for number in range(len(told.read_text().splitlines()))]


def killed_redo(
    forked: Forge,
    tmp_path: Path,
    kind: str,
    change: list[str],
    chosen: Callable[[list[str]], list[str]],
    faults: Faults,
) -> None:
    """Kill a redo at each chosen step, finish it, and compare with a redo that nobody disturbed."""
    manifest(tmp_path / "m.parquet", rows(25))
    for out in ("calm", "run"):
        assert forked(settings(tmp_path, f"output={kind}", out=out)).returncode == 0
    if not change:
        manifest(tmp_path / "m.parquet", edited(0, 3, 24))
    redo = [f"output={kind}", REDO, *change]
    steps = steps_of(forked, settings(tmp_path, *redo, out="calm"), tmp_path / "steps")
    calm = data_files(tmp_path / "calm")
    for step in chosen(steps):
        done = forked(settings(tmp_path, *redo), KILL_AT=step)
        faults.kill(done.returncode == -9)
        counts, found = verify(RunFolder(tmp_path / "run"), decode=False)
        assert counts.balanced
        assert [fault for fault in found if fault.remedy != "run"] == []
        ids = [row_id for lines in Ledger.read(RunFolder(tmp_path / "run")).commits.values() for row_id in lines]
        assert ids or done.returncode
        if kind == "parquet":
            standing = ids_written(tmp_path / "run")
            assert len(standing) == len(set(standing)), f"an id stands twice after {step}"
    assert forked(settings(tmp_path, *redo)).returncode == 0
    assert data_files(tmp_path / "run") == calm
    sound(tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["webdataset", "parquet", "folder"])
def test_a_redo_killed_at_some_steps_in_a_row_ends_like_one_that_was_not(
    forked: Forge, tmp_path: Path, kind: str, faults: Faults
) -> None:
    killed_redo(forked, tmp_path, kind, [], lambda steps: steps[3 : len(steps) : 6], faults)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_other_settings_killed_at_some_steps_in_a_row(forked: Forge, tmp_path: Path, kind: str, faults: Faults) -> None:
    killed_redo(forked, tmp_path, kind, ["output.image_format=jpeg"], lambda steps: steps[4 : len(steps) : 9], faults)


@pytest.mark.slow
@pytest.mark.parametrize("change", [[], ["output.image_format=jpeg"]])
@pytest.mark.parametrize("kind", THREE_OUTPUTS)
def test_a_redo_killed_at_every_step_in_a_row(
    forked: Forge, tmp_path: Path, kind: str, change: list[str], faults: Faults
) -> None:
    killed_redo(forked, tmp_path, kind, change, lambda steps: steps, faults)
