"""Whole jobs with pipelines of other families, in processes of their own: killed, resumed, looked into."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Faults
from forge import Done, Forge, forge
from PIL import Image
from test_run import data_files, ids_written, manifest, sound
from test_whole import by_hand, row
from tiny_pipelines import BATCHED, save

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "sana", "pixart", "qwen_image")]
ROWS: list[dict[str, Any]] = [
    {"id": "red", "prompt": "a red circle", "seed": 11, "guidance_scale": 4.0},
    {"id": "blue", "prompt": "two blue squares on a yellow background", "seed": 12, "negative_prompt": "at night"},
    {"id": "cat", "prompt": "a cat in the snow " * 30, "seed": 13, "guidance_scale": 2.5},
    {"id": "star", "prompt": "a green star", "seed": -14, "guidance_scale": 1.0},
    {"id": "wide", "prompt": "a ring", "seed": 15, "height": 64, "width": 96},
    {"id": "again", "prompt": "a red circle", "seed": 16},
]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return lambda name: root / name if (root / name).exists() else save(name, root / name)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Done]]:
    """The real command with the model that its settings name."""
    with forge(tmp_path_factory.mktemp("forge"), "tiny_pipelines", "fluxbatch.models.whole") as forked:
        cache = str(tmp_path_factory.mktemp("cache"))

        def run(overrides: list[str], verb: str = "run", **environ: str) -> Done:
            return started(forked, overrides, verb, FLUXBATCH_CACHE=cache, REAL_MODEL="1", **environ)

        yield run


def started(forked: Forge, overrides: list[str], verb: str, **environ: str) -> Done:
    return forked(overrides, verb, **environ)


def settings(tmp_path: Path, folder: Path, *overrides: str, out: str = "run") -> list[str]:
    sizes = ("sampler.height=64", "sampler.width=64", "sampler.num_inference_steps=2", "sampler.guidance_scale=4")
    return [
        f"manifest.path={tmp_path}/m.parquet",
        f"output.dir={tmp_path}/{out}",
        "model=diffusers",
        f"model.path={folder}",
        "model.dtype=float32",
        "model.device=cpu",
        "plan.shard_size=4",
        "telemetry.progress=off",
        *sizes,
        *overrides,
    ]


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {
        written["id"]: np.asarray(Image.open(io.BytesIO(written["image"]["bytes"])))
        for path in sorted((folder / "data").glob("*.parquet"))
        for written in pq.read_table(path).to_pylist()
    }


@pytest.mark.parametrize("name", ["sd3", pytest.param("z_image", marks=pytest.mark.slow), *SLOW])
def test_a_job_that_is_killed_and_resumed_has_the_bytes_of_one_that_was_not(
    name: str, tmp_path: Path, command: Callable[..., Done], pipelines: Callable[[str], Path], faults: Faults
) -> None:
    """Killed with all stages at once, resumed with one after another; the pictures are those of a call by hand."""
    rows = [{**given, "height": 64, "width": given.get("width", 64)} for given in ROWS]
    rows = [{"negative_prompt": None, "guidance_scale": None, **given} for given in rows]
    manifest(tmp_path / "m.parquet", rows)
    sizes = ["plan.batch_size=2"] if name in BATCHED else []
    whole = command(settings(tmp_path, pipelines(name), *sizes, out="whole"))
    assert whole.returncode == 0, whole.stderr
    killed = command(settings(tmp_path, pipelines(name), *sizes), KILL_AT="publish:4")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any((tmp_path / "run" / "batches").glob("*/batch-*")), "it was killed between two batches"
    faults.kill()
    again = command(settings(tmp_path, pipelines(name), *sizes, "pipeline=serial"))
    assert again.returncode == 0, again.stderr
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")
    sound(tmp_path / "run")
    faults.rows(asked=[given["id"] for given in rows], found=ids_written(tmp_path / "run"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pictures = stored(tmp_path / "run")
    for number in (1, 3):
        fields = {**rows[number], "guidance_scale": rows[number]["guidance_scale"] or 4.0}
        wanted = by_hand(pipelines(name), row(0, negative=fields.pop("negative_prompt"), **fields))
        distance = np.abs(pictures[rows[number]["id"]].astype(int) - wanted.astype(int)).max()
        assert distance <= (1 if name in BATCHED else 0)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_verbs_that_look_into_a_run_know_such_a_pipeline(
    tmp_path: Path, command: Callable[..., Done], pipelines: Callable[[str], Path]
) -> None:
    manifest(tmp_path / "m.parquet", [{"id": "a", "prompt": "a red circle"}, {"id": "b", "prompt": "a cat"}])
    job = settings(tmp_path, pipelines("sd3"), "plan.batch_size=2")
    planned = json.loads(command([*job, "--json"], "plan").stdout)
    assert [(bucket["name"], bucket["batch_size"]) for bucket in planned["buckets"]] == [("64x64-2-cfg-g4.0", 2)]
    assert command(job).returncode == 0
    record = json.loads((tmp_path / "run" / "job.json").read_text())
    assert record["fingerprint"]["model.pipeline"].startswith("StableDiffusion3Pipeline ")
    for verb in ("status", "verify", "report"):
        done = command(job, verb)
        assert done.returncode == 0, done.stderr
    where = f"output.dir={tmp_path}/run"
    assert "equal: the bytes" in command([where, "id=b"], "render").stdout
    assert "prompt: a cat" in command([where, "id=b", f"to={tmp_path}/b.png"], "show").stdout
    assert "again" not in command(job).stderr


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_scheduler(
    tmp_path: Path, command: Callable[..., Done], pipelines: Callable[[str], Path]
) -> None:
    manifest(tmp_path / "m.parquet", [{"id": "a", "prompt": "a red circle"}])
    folder = save("sd3", tmp_path / "own")
    assert command(settings(tmp_path, folder)).returncode == 0
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps({**json.loads(scheduler.read_text()), "shift": 1.0}))
    done = command(settings(tmp_path, folder))
    assert done.returncode == 2 and "model.pipeline must be 'StableDiffusion3Pipeline" in done.stderr
    assert "the settings here are of" in command([f"output.dir={tmp_path}/run", "id=a"], "render").stderr
