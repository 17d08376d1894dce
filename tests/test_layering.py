"""Imports go downward only: the ranks of the modules, and who may import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fluxbatch"

# Lower ranks know nothing of higher ones; rooms of one rank do not import each other.
RANKS = [
    {"errors", "records", "process", "step_cache", "klein"},
    {"storage", "pipeline_call", "tiny"},
    {"config", "user_cache"},
    {"lora_files", "config_rules", "compose", "stop", "model_folder"},
    {"manifest", "telemetry"},
    {"plan"},
    {"output"},
    {"models", "reports"},
    {"pipeline", "processes"},
    {"share", "forecast", "planning"},
    {"drawing", "helping"},
    {"cluster"},
    {"run"},
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


def taken(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file needs when it is imported; of a package whose modules it takes, only those."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules | ({node.module} if names - modules else set())
    return found


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def test_no_module_comes_back_to_itself() -> None:
    """Within a room, too, imports go one way."""
    paths = {module(path): path for path in MODULES}
    left = {name: taken(path, set(paths)) - {name} for name, path in paths.items()}
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left, f"imports go round among {sorted(left)}"


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
    for path in (PACKAGE / room_of_tensors).rglob("*.py"):
        assert not our_rooms(path) & {"storage", "manifest", "plan", "output", "reports"}, path


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
