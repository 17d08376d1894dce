"""Imports go downward only: the ranks of the modules, and who may import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fluxbatch"

# Lower ranks know nothing of higher ones; modules of one rank do not import each other unless listed in order.
RANKS = [
    {"errors", "records", "folder", "process", "step_cache", "klein"},
    {"tiny"},
    {"object_store"},
    {"objects"},
    {"commit", "config", "user_cache", "devices", "pipeline_call"},
    {"lora_files"},
    {"compose", "ranks", "stop", "lease", "job", "plan", "rates", "model_folder", "lines"},
    {"rows", "estimate", "batch_size", "row_spool", "deal"},
    {"manifest", "planfile"},
    {"row_keys", "plan_writer"},
    {"planner", "prompt_files"},
    {"writers", "prompt_columns"},
    {"shards", "make_manifest"},
    {"ledger", "stored_images"},
    {"left"},
    {"verify", "metrics", "progress", "loggers", "one_row", "reuse", "publish"},
    {"models", "repair"},
    {"pipeline"},
    {"card", "charts", "contact_sheet", "throughput", "preflight"},
    {"page"},
    {"report"},
    {"share", "forecast", "planning"},
    {"drawing", "helping", "crew_view"},
    {"cluster"},
    {"run", "supervisor"},
    {"bench"},
    {"verbs", "word_verbs", "job_script"},
    {"command"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
TENSORS = {"models", "pipeline", "bench"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def our_rooms(path: Path) -> set[str]:
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("fluxbatch.")}
    return {name for name in rooms if name in RANK} - {room(path)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        assert not our_rooms(path)
        return
    assert room(path) in RANK, f"{room(path)} has no rank yet"
    higher = {name for name in our_rooms(path) if RANK[name] >= RANK[room(path)]}
    assert not higher, f"{room(path)} (rank {RANK[room(path)]}) imports {higher}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_decisions_never_import_torch_at_the_door(path: Path) -> None:
    """Only rooms of tensors import torch at their top; run.py and others do inside the function that draws."""
    tree = ast.parse(path.read_text())
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    modules = {alias.name for node in top.body if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in top.body if isinstance(node, ast.ImportFrom)}
    heavy = {name for name in modules if name.split(".")[0] in {"torch", "diffusers", "transformers"}}
    assert room(path) in TENSORS | {"tiny"} or not heavy


@pytest.mark.parametrize("room_of_tensors", ["pipeline", "models"])
def test_tensors_never_know_that_files_of_a_run_exist(room_of_tensors: str) -> None:
    files = {
        "commit",
        "lines",
        "objects",
        "object_store",
        "shards",
        "writers",
        "ledger",
        "planner",
        "planfile",
        "manifest",
        "rows",
        "verify",
        "lease",
        "job",
    }
    for path in (PACKAGE / room_of_tensors).glob("*.py"):
        assert not our_rooms(path) & files, path


def test_plan_and_cfg_work_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['diffusers'] = sys.modules['transformers'] = None;"
        "from fluxbatch.__main__ import main; main()"
    )
    for arguments in (["plan", "job=demo"], ["--cfg", "job", "job=demo"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, f"output.dir={tmp_path}/run"],
            cwd=PACKAGE.parent,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
