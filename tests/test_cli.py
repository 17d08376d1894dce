"""The command as a person types it, in processes of its own, with the embedded model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent


def fluxbatch(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fluxbatch", *arguments],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def manifest(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return f"manifest.path={path}"


SMALL = (
    "sampler.height=64",
    "sampler.width=64",
    "sampler.num_inference_steps=2",
    "plan.batch_size=2",
    "plan.shard_size=4",
)
ROWS = [
    {"id": f"r{n}", "prompt": f"a {colour} circle"}
    for n, colour in enumerate(["red", "blue", "green", "black", "pink"])
]


def test_a_typo_and_an_impossible_size_are_one_sentence_and_exit_2() -> None:
    typo = fluxbatch("job=demo", "model.dtpe=float16")
    assert (typo.returncode, typo.stdout) == (2, "")
    assert typo.stderr.strip() == "fluxbatch: model.dtpe is not a setting; did you mean model.dtype?"
    size = fluxbatch("job=demo", "sampler.height=100")
    assert (size.returncode, size.stderr.count("\n")) == (2, 1)
    assert "sampler.height must be a multiple of 16 for tiny, got 100; nearest 96, 112" in size.stderr


def test_an_unknown_verb_and_a_missing_manifest_setting_exit_2() -> None:
    assert fluxbatch("rum", "job=demo").returncode == 2
    nothing = fluxbatch("plan")
    assert nothing.returncode == 2 and "manifest.path must name" in nothing.stderr


def test_a_manifest_that_is_not_there_exits_3_with_its_path(tmp_path: Path) -> None:
    done = fluxbatch("plan", f"manifest.path={tmp_path}/none.parquet")
    assert done.returncode == 3 and "none.parquet" in done.stderr and done.stderr.count("\n") == 1


def test_a_file_of_prompts_as_manifest_names_the_verb_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "my prompts.csv").write_text("id,prompt\na,a cat\n")
    done = fluxbatch("plan", f"manifest.path={tmp_path}/my prompts.csv")
    assert done.returncode == 3
    assert f"`python -m fluxbatch manifest from='{tmp_path}/my prompts.csv' to='my prompts.parquet'`" in done.stderr


def test_plan_answers_for_people_and_for_scripts_and_writes_nothing(tmp_path: Path) -> None:
    out = f"output.dir={tmp_path}/run"
    began = time.monotonic()
    words = fluxbatch("plan", "job=demo", out)
    assert time.monotonic() - began < 10
    assert words.returncode == 0 and "rejected: 0" in words.stdout
    answer = json.loads(fluxbatch("plan", "job=demo", "--json", out).stdout)
    assert answer["rows"] == answer["accepted"] == pq.read_metadata(ROOT / "manifests" / "demo.parquet").num_rows
    assert len({(bucket["height"], bucket["width"]) for bucket in answer["buckets"]}) >= 5
    assert not (tmp_path / "run").exists()


def test_plan_exits_4_with_the_reasons_of_rejected_rows(tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.parquet", [*ROWS, {"id": "bad", "prompt": None}])
    done = fluxbatch("plan", path, *SMALL)
    assert done.returncode == 4 and "null_prompt: 1" in done.stdout


@pytest.mark.parametrize("words", ["plan job=demo", "--help"])
def test_a_reader_that_stops_early_gets_no_complaint(words: str) -> None:
    command = f"{sys.executable} -m fluxbatch {words} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_cfg_print_and_exit_0() -> None:
    shown = fluxbatch("--help")
    assert shown.returncode == 0 and "75 interrupted" in shown.stdout and "flux2_klein_4b" in shown.stdout
    cfg = fluxbatch("--cfg", "job", "job=demo")
    assert cfg.returncode == 0 and "shard_size: 16" in cfg.stdout


def test_run_status_verify_and_report_from_the_folder_alone(tmp_path: Path) -> None:
    path, out = manifest(tmp_path / "m.parquet", ROWS), f"output.dir={tmp_path}/my run"
    done = fluxbatch(path, out, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "written: 5" in done.stdout and "contact_sheet.png" in done.stdout
    assert "\r" not in done.stderr and "\x1b" not in done.stderr, "no bar where there is no terminal"
    for verb in ("status", "verify", "report"):
        answer = fluxbatch(verb, "--json", out)
        assert answer.returncode == 0, answer.stderr
        json.loads(answer.stdout)
    assert json.loads(fluxbatch("status", "--json", out).stdout)["written"] == 5
    assert "written: 5" in fluxbatch("verify", out).stdout


def test_br44_a_bare_environment_is_enough(tmp_path: Path) -> None:
    path, out = manifest(tmp_path / "m.parquet", ROWS), f"output.dir={tmp_path}/run"
    done = subprocess.run(
        [sys.executable, "-m", "fluxbatch", path, out, *SMALL], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_br44_a_model_that_is_not_there_is_refused_in_seconds_before_the_plan(tmp_path: Path) -> None:
    path, out = manifest(tmp_path / "m.parquet", ROWS), f"output.dir={tmp_path}/run"
    done = fluxbatch(path, out, "model=flux1_dev", f"model.path={tmp_path}/nowhere", HF_HUB_OFFLINE="1")
    assert done.returncode in (1, 2) and "model.path" in done.stderr
    assert not (tmp_path / "run" / "plan.parquet").exists()


@pytest.mark.slow
def test_verify_of_a_damaged_folder_exits_5_with_the_file(tmp_path: Path) -> None:
    path, out = manifest(tmp_path / "m.parquet", ROWS), f"output.dir={tmp_path}/run"
    assert fluxbatch(path, out, *SMALL).returncode == 0
    (tmp_path / "run" / "data" / "shard-00001.parquet").unlink()
    found = fluxbatch("verify", out)
    assert found.returncode == 5 and "shard-00001.parquet" in found.stdout


@pytest.mark.slow
def test_killed_and_started_again_the_embedded_model_writes_the_same_bytes(tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.parquet", ROWS)
    assert fluxbatch(path, f"output.dir={tmp_path}/whole", *SMALL).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "fluxbatch", path, f"output.dir={tmp_path}/run", *SMALL],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 120
    while (
        not list((tmp_path / "run").glob("batches/*/batch-*")) and time.monotonic() < until and process.poll() is None
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert fluxbatch(path, f"output.dir={tmp_path}/run", *SMALL).returncode == 0
    for shard in sorted((tmp_path / "whole" / "data").iterdir()):
        assert (tmp_path / "run" / "data" / shard.name).read_bytes() == shard.read_bytes()
    assert fluxbatch("verify", f"output.dir={tmp_path}/run").returncode == 0


@pytest.mark.parametrize("name", ["run=3/m.parquet", "a,b.parquet", "m (1) 李明.parquet"])
def test_br42_manifest_paths_of_any_letters(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    assert fluxbatch("plan", manifest(tmp_path / name, ROWS), *SMALL).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A real file system of 400 kB; skipped where mounting is not allowed."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_with_the_path_and_with_room_again_the_same_command_finishes(
    tmp_path: Path, small_disk: Path
) -> None:
    rows = [{"id": f"r{n}", "prompt": f"p {n}", "height": 256, "width": 256} for n in range(40)]
    settings = [manifest(tmp_path / "m.parquet", rows), f"output.dir={small_disk}/run", "output.image_format=jpeg",
                "sampler.num_inference_steps=1", "plan.batch_size=2", "plan.shard_size=8"]  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "run_fake.py"), "run", *settings]
    full = subprocess.run(command, capture_output=True, text=True)
    assert full.returncode == 1
    assert "No space left on device; make room" in full.stderr.splitlines()[-1]
    assert str(small_disk) in full.stderr.splitlines()[-1]
    assert not list(small_disk.rglob(".tmp-*"))
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    assert subprocess.run(command, capture_output=True).returncode == 0
    answer = json.loads(fluxbatch("verify", "--json", f"output.dir={small_disk}/run").stdout)
    assert (answer["written"], answer["failed"], answer["discrepancies"]) == (40, 0, [])


def test_br40_a_signal_while_importing_ends_with_75() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fluxbatch", "job=demo"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process.pid).cpu_times().user < 0.1:  # importing by now, however busy the machine is
            time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 75, words


def test_a_crash_in_compiled_code_says_where_in_the_log() -> None:
    """A fault in a driver or a package ends the process without an exception; a person has only the log."""
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    code = f"import fluxbatch.__main__ as entry; entry.exit_on_signals = lambda: exec({crash!r}); entry.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr and "__main__.py" in ended.stderr
