"""The whole way of the embedded FLUX.2 on a CPU: trained for seconds, installed in a copy, drawn with, killed, scored.

What it draws is noise, but it is the noise that diffusers draws with the same folder.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline
from test_parity import assert_same_pictures, pixels, reference, request
from test_tiny import SMOKE
from tiny_models import model_config

from fluxbatch.models import load_model
from fluxbatch.tiny.install import Place

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


class Copy:
    """A checkout of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("fluxbatch", "conf", "manifests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "model_flux2"))
        self.place = Place.of("flux2", root)
        self.environ = {**os.environ, "PYTHONPATH": str(root)}

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=self.root, env=self.environ, **pipes)

    def run(self, module: str, *arguments: str, code: int = 0) -> str:
        process = self.start(module, *arguments)
        out, err = process.communicate()
        assert process.returncode == code, out + err
        return out + err


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """With a model installed as the README of the training says."""
    made = Copy(tmp_path_factory.mktemp("checkout"))
    refused = made.run("fluxbatch", "job=demo", "model=tiny_flux2", code=2)
    assert "model=tiny_flux2 has no weights in" in refused
    out = str(tmp_path_factory.mktemp("training") / "out")
    made.run("fluxbatch.tiny.train", "--model", "flux2", "--from", "vae", *SMOKE, "--out", out)
    assert "one more run" in made.run("fluxbatch.tiny.install", out)
    return made


def test_the_page_has_the_run_and_its_scores_and_no_longer_says_that_there_are_none(copy: Copy) -> None:
    text = copy.place.record.read_text()
    section = text.partition("## The FLUX.2 model")[2]
    assert "--model flux2 --from vae` | CPU, torch " in section
    assert "| 128x128, 2 steps | CPU | 1 |" in section
    assert "| control: ground truth, 128x128 | CPU | 1 | 1.000 |" in section
    assert "no weights" not in text
    before = Place.of("flux2").record.read_text()
    assert text.partition("## The FLUX.2")[0] == before.partition("## The FLUX.2")[0]
    assert copy.place.settings.read_text() == (ROOT / "conf/model/tiny_flux2.yaml").read_text()


def test_the_demo_is_drawn_killed_and_resumed_to_the_same_bytes(copy: Copy, tmp_path: Path) -> None:
    small = ["job=demo", "model=tiny_flux2", "model.device=cpu"]
    copy.run("fluxbatch", *small, f"output.dir={tmp_path}/whole", code=4)  # two rows have negative prompts
    process = copy.start("fluxbatch", *small, f"output.dir={tmp_path}/run")
    until = time.monotonic() + 300
    while not list((tmp_path / "run").glob("batches/*/batch-*")) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    copy.run("fluxbatch", *small, f"output.dir={tmp_path}/run", code=4)
    for shard in sorted((tmp_path / "whole" / "data").iterdir()):
        assert (tmp_path / "run" / "data" / shard.name).read_bytes() == shard.read_bytes()
    told = json.loads(copy.run("fluxbatch", "verify", "--json", f"output.dir={tmp_path}/run"))
    assert (told["written"], told["rejected"], told["pending"], told["discrepancies"]) == (46, 2, 0, [])


def test_pictures_equal_those_of_diffusers_on_the_installed_folder(copy: Copy) -> None:
    rows = [
        request("a red circle on a blue background", seed=11, size=(128, 128), steps=4),
        request("two yellow stars at night", seed=12, size=(128, 128), steps=4),
        request("a cat", seed=13, size=(96, 160), steps=2),
    ]
    settings = {"name": "tiny_flux2", "family": "flux2", "guidance": "none", "max_sequence_length": 32}
    model = load_model(model_config(path=str(copy.place.folder), **settings), true_cfg_scale=2.0)
    pipeline = Flux2KleinPipeline.from_pretrained(copy.place.folder, dtype=torch.float32)
    theirs = [reference(pipeline, row, max_sequence_length=32, guidance_scale=1.0) for row in rows]
    assert_same_pictures(pixels(model, rows), theirs)


def test_a_later_examination_completes_its_table(copy: Copy, tmp_path: Path) -> None:
    words = ["--settings", "128x128, 4 steps", "--prompts", "1", "--out", str(tmp_path / "out")]
    copy.run("fluxbatch.tiny.examine", "--model", "tiny_flux2", *words)
    before = copy.place.record.read_text()
    assert "scores of 4 settings" in copy.run("fluxbatch.tiny.install", str(tmp_path / "out"))
    added = set(copy.place.record.read_text().splitlines()) - set(before.splitlines())
    assert [line[:28] for line in added] == ["| 128x128, 4 steps | CPU | 1"]
