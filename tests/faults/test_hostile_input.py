"""Prompts that break lines, terminals, tags and limits; model folders that would run code."""

import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_run import command, do, settings, sound
from tiny_models import model_config

from fluxbatch import tiny
from fluxbatch.errors import FluxbatchError
from fluxbatch.models import check_model, load_model

PROMPTS = {
    "nul": "a\0b",
    "bidi": "abc \u202egnp.exe\u202c \u2066עברית\u2069",
    "long": "λ" * 100_000,  # 200 kB of UTF-8
    "lines": "one\r\ntwo\ttwo\x85three\u2028four\x0bfive",
    "emoji": "👩‍🚀🏳️‍🌈 e\u0301",
    "noncharacter": "\ufffe\uffff\U0010ffff",
    "escape": "\x1b[2J\x1b]0;title\x07",
    "markup": "</script><img src=x onerror=alert(1)>{{7*7}}|`$(id)`",
    "override": "${oc.env:HOME} %s %(x)s {0}",
    "json": '"}],\\u0000\\',
    "space": " \u00a0padded\u3000 ",
}


def stored_prompts(folder: Path, output: str) -> dict[str, str]:
    if output == "parquet":
        return {row["id"]: row["prompt"] for row in pq.read_table(folder / "data").to_pylist()}
    if output == "folder":
        lines = [line for path in (folder / "data").rglob("metadata.jsonl") for line in path.open(newline="\n")]
        return {record["id"]: record["prompt"] for record in map(json.loads, lines)}
    found = {}
    for path in (folder / "data").glob("*.tar"):
        with tarfile.open(path) as tar:
            records = [json.load(tar.extractfile(m)) for m in tar if m.name.endswith(".json")]  # type: ignore[arg-type]
        found |= {record["id"]: record["prompt"] for record in records}
    return found


@pytest.mark.parametrize(
    ("output", "image_format"), [("parquet", "png"), ("webdataset", "jpeg"), ("folder", "webp"), ("folder", "png")]
)
def test_br05_any_prompt_is_stored_letter_by_letter_and_stops_nothing(
    tmp_path: Path, faults, output: str, image_format: str
) -> None:
    content = [{"id": name, "prompt": prompt, "negative_prompt": prompt} for name, prompt in PROMPTS.items()]
    pq.write_table(pa.Table.from_pylist(content), tmp_path / "m.parquet")
    size = ["sampler.height=64", "sampler.width=64", f"output.image_format={image_format}"]
    counts, code = do(settings(tmp_path, f"output={output}", *size))
    assert (counts.written, code) == (len(PROMPTS), 0)
    assert stored_prompts(tmp_path / "run", output) == PROMPTS
    faults.rows(asked=PROMPTS, found=stored_prompts(tmp_path / "run", output))
    sound(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<img src=x" not in page and not set("\0\x1b\u202e") & set(page)


def test_br05_a_failing_row_of_any_prompt_prints_one_line_and_no_escape(tmp_path: Path) -> None:
    """Ids and prompts reach the terminal in messages."""
    content = [{"id": f"{name}\n\x1b[2J", "prompt": None} for name in PROMPTS]
    content += [{"id": name, "prompt": prompt} for name, prompt in PROMPTS.items()]
    pq.write_table(pa.Table.from_pylist(content), tmp_path / "m.parquet")
    done = command(settings(tmp_path, "sampler.height=64", "sampler.width=64", "telemetry.progress=lines"))
    assert done.returncode == 4
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stderr
    assert all(len(line) < 500 for line in done.stderr.splitlines())


# --- models -----------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The embedded model, with a pickle beside each of its weights that leaves a mark where it is opened."""
    model = Path(shutil.copytree(tiny.FOLDER, tmp_path / "model"))
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    for weights in model.rglob("*.safetensors"):
        for name in ("pytorch_model.bin", f"{weights.stem}.bin", "model.ckpt", "model.pt"):
            weights.with_name(name).write_bytes(pickle.dumps(Bomb()))
    return model


def refusal(folder: Path) -> str:
    with pytest.raises(FluxbatchError) as error:
        check_model(model_config(path=str(folder)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_pickles_beside_the_safetensors_are_never_opened(folder: Path, tmp_path: Path) -> None:
    load_model(model_config(path=str(folder)), true_cfg_scale=2.0)
    assert not (tmp_path / "exploded").exists()


def test_a_folder_of_pickles_lacks_its_weights(folder: Path, tmp_path: Path) -> None:
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    assert "text_encoder/model.safetensors" in refusal(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "place", ["transformer/config.json", "text_encoder/config.json", "tokenizer_2/tokenizer_config.json"]
)
def test_a_part_that_brings_its_own_code_is_refused_by_name(folder: Path, place: str) -> None:
    path = folder / place
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}))
    (path.parent / "evil.py").write_text("raise SystemExit('run')")
    assert f"{place} has an auto_map; code that comes with a model is never run" in refusal(folder)


def test_a_pipeline_of_other_classes_is_refused_by_name(folder: Path) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vae": ["evil", "AutoencoderKL"]}))
    assert "vae comes from 'evil'; code that comes with a model is never run" in refusal(folder)


def test_a_settings_file_that_is_no_text_is_one_sentence(folder: Path) -> None:
    (folder / "vae" / "config.json").write_bytes(b"\xff\xfe{")
    assert "is not JSON" in refusal(folder)
