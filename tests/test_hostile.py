"""Names and folders that mean harm: nothing is written outside the run folder, and no secret stands in a file."""

import os
import re
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_model import FakeModel
from forge import forge
from test_run import do, manifest, rows, settings, sound
from three_outputs import ONE_OUTPUT, THREE_OUTPUTS

from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.writers import stored_ids
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

IDS = (
    "../../etc/x", "/etc/passwd", "..", ".", "...", ".hidden", "con", "CON.png", "nul", "a/b", "a\\b", "x" * 300,
    "é" * 300, "🦊🔥",
    "v1.2/0001", "img.v2.001", "img.v2.002", "-rf", "--help", "$(touch pwned)", "`id`", "a\nb", "a\tb",
    "*", "~root", "%2e%2e%2f", "\u202egnp.exe", "metadata.jsonl", "METADATA", "shard-00000", ".tmp-x", "a:b", "ａ", "A",
)  # fmt: skip


def tree(place: Path) -> dict[str, float]:
    return {str(path.relative_to(place)): path.lstat().st_mtime_ns for path in place.rglob("*")}


@pytest.mark.parametrize("kind", THREE_OUTPUTS)
def test_br29_no_id_leads_outside_and_each_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "a" / "b" / "c" / "d"
    place.mkdir(parents=True)
    manifest(place / "m.parquet", [{"id": row_id, "prompt": f"p {n}"} for n, row_id in enumerate(IDS)])
    before = tree(tmp_path)
    assert do(settings(place, f"output={kind}"))[1] == 0
    outside = {name for name in tree(tmp_path) if not name.startswith("a/b/c/d/run")}
    assert outside == set(before), "something was written beside the run folder"
    folder = RunFolder(place / "run")
    lines = [line for lines in Ledger.read(folder).commits.values() for line in lines]
    assert sorted(row_id for line in lines for row_id in stored_ids(folder.root / line.file)) == sorted(IDS)
    names = [path.name for path in folder.root.rglob("*")]
    for path in folder.data.glob("*.tar"):
        with tarfile.open(path) as tar:
            names += tar.getnames()
    assert all("/" not in name and len(name.encode()) < 200 for name in names)
    assert not any(name.startswith(("..", "-", "~")) or name.isspace() for name in names)
    sound(folder.root)


@pytest.mark.parametrize(
    "prompt", ["a\0b", "\u202eevil\u2066", "x" * 200_000, "\r\n\x1b[2J", "${oc.env:HOME}", "{{7*7}}"]
)
def test_br05_a_prompt_of_any_text_is_stored_letter_by_letter(tmp_path: Path, prompt: str) -> None:
    manifest(tmp_path / "m.parquet", [{"id": "a", "prompt": prompt}])
    assert do(settings(tmp_path))[1] == 0
    [row] = pq.read_table(tmp_path / "run" / "data").to_pylist()
    assert row["prompt"] == prompt
    sound(tmp_path / "run")


# Symlinks


STATE = ("job.json", "rejected.parquet", "plan.parquet", "ledger/rank-00000.jsonl", "logs/metrics-rank-00000.jsonl",
         "locks/rank-00000.json", "README.md", "report.json", "report.html", "contact_sheet.png", "_SUCCESS",
         "data/shard-00000.parquet", "batches/shard-00000/batch-00000000.arrow",
         "failed/shard-00000.parquet")  # fmt: skip


@pytest.mark.parametrize("content", ["text", "nothing"])
@pytest.mark.parametrize("name", STATE)
def test_a_symlink_under_any_name_of_a_run_folder_is_not_written_through(
    tmp_path: Path, name: str, content: str
) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    target = tmp_path / "victim"
    if content != "nothing":
        target.write_text("precious\n")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    (tmp_path / "run" / "data").mkdir(exist_ok=True)  # a folder of ours, else it is refused as somebody's
    link.symlink_to(target)
    before = target.read_bytes() if content != "nothing" else None
    with pytest.raises(ConfigError, match=f"{re.escape(name)} is a symlink"):
        do(settings(tmp_path))
    assert (target.read_bytes() if target.exists() else None) == before


def test_a_folder_shard_that_is_a_symlink_is_not_filled(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "data" / "shard-00000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a symlink"):
        do(settings(tmp_path, "output=folder"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_temporary_file_that_is_a_symlink_is_removed_itself(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    name = f".tmp-x-{'0' * 12}-{commit.process.host()}-{2**22 - 1}"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "kept")
    commit.remove_temporaries(tmp_path / "run")
    assert (tmp_path / "kept").read_text() == "x" and list((tmp_path / "run").iterdir()) == []


# Secrets


SECRETS = {
    "HF_TOKEN": "hf_SecretOfTheHub", "HUGGING_FACE_HUB_TOKEN": "hf_SecretOfOld", "WANDB_API_KEY": "SecretOfWandb",
    "AWS_SECRET_ACCESS_KEY": "SecretOfAws", "AWS_SESSION_TOKEN": "SecretOfSession", "OPENAI_API_KEY": "sk-Secret",
    "http_proxy": "http://user:SecretOfProxy@proxy:3128", "SLURM_JWT": "SecretOfSlurm",
}  # fmt: skip


@pytest.mark.parametrize("kind", ONE_OUTPUT)
def test_no_secret_of_the_environment_stands_in_a_file_or_in_the_log(tmp_path: Path, kind: str) -> None:
    manifest(tmp_path / "m.parquet", [*rows(12), {"id": "bad", "prompt": None}])
    with forge(tmp_path / "forge") as forked:
        overrides = settings(tmp_path, f"output={kind}")
        dones = [forked(overrides, KILL_AT="publish:6", **SECRETS), forked(overrides, **SECRETS)]
        dones += [forked(overrides, verb, **SECRETS) for verb in ("status", "verify", "report", "plan")]
    assert [done.returncode for done in dones[1:]] == [4, 0, 0, 0, 4]
    texts = [(path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()]
    texts += [(Path("the log"), (done.stdout + done.stderr).encode()) for done in dones]
    for path, content in texts:
        found = [name for name, secret in SECRETS.items() if secret.encode() in content or b"SecretOfProxy" in content]
        assert not found, f"{path} holds {found}"


def test_a_run_folder_of_pickles_runs_no_code(tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    for name in ("job.json", "rejected.parquet", "ledger/rank-00000.jsonl", "locks/rank-00000.json"):
        (tmp_path / "run" / name).write_bytes(pickle.dumps(Bomb()))
        assert do(settings(tmp_path), FakeModel)[1] == 0, "what can be made anew is made anew"
    (tmp_path / "run" / "plan.parquet").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FluxbatchError, match=r"plan\.parquet"):
        do(settings(tmp_path), FakeModel)
    assert not (tmp_path / "exploded").exists()


def test_an_arrow_extension_type_in_a_manifest_runs_no_code(tmp_path: Path) -> None:
    pickled = b"cos\nmkdir\n(S'/tmp/pwned'\ntR."
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled}
    field = pa.field("x", pa.binary(), metadata=extension)
    schema = pa.schema([pa.field("id", pa.string()), pa.field("prompt", pa.string()), field])
    pq.write_table(pa.table([["a"], ["p"], [b"1"]], schema=schema), tmp_path / "m.parquet")
    do(settings(tmp_path))
    assert not Path("/tmp/pwned").exists()
