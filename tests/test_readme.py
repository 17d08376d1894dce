"""What the README tells a person to type works, and what it quotes is what the program says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_config import composed
from test_run import TESTS, manifest, sound

README = (TESTS.parent / "README.md").read_text()
PACKAGE = TESTS.parent / "fluxbatch"
STAND_INS = {  # no weights here, and small pictures
    "model=flux1_dev model.path=/models/FLUX.1-dev": "model=tiny",
    "model=flux1_dev model.path=/models/flux1-dev-nvfp4.safetensors model.base=/models/FLUX.1-dev": "model=tiny",
    "model.loras=[{path:/loras/ink.safetensors,weight:0.8}]": "model.loras=[]",
    "model=flux2_klein_4b model.path=/models/FLUX.2-klein-4B": "model=tiny",
    "sizes=1024x1024,768x1344": "sizes=64x64,64x96",
    "id=mug-1024x1024-s0": "id=mug-64x64-s0",
    "model.memory_budget_gib=22": "",
}
SHIM = """#!/bin/sh
shift 2  # -m fluxbatch
exec {python} {script} "$@"
"""
CSV = "id,prompt\nmug,a red mug\nlamp,a green lamp\n"


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)^## ", README, flags=re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {title}"
    return found[1]


def blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)


RECIPES = blocks(section("Recipes"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with prompts and a catalogue, and programs that stand in: the model is the fake one of other tests."""
    (tmp_path / "prompts.csv").write_text(CSV)
    manifest(tmp_path / "catalogue.parquet", [{"id": f"p{n}", "prompt": "a shoe", "price": n} for n in range(3)])
    manifest(tmp_path / "prompts.parquet", [{"id": f"p{n}", "prompt": "a hat"} for n in range(3)])
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text(SHIM.format(python=sys.executable, script=TESTS / "run_fake.py"))
    (programs / "sbatch").write_text('#!/bin/sh\nfor script; do :; done\nexec bash -n "$script"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def typed(block: str) -> str:
    for word, stand_in in STAND_INS.items():
        block = block.replace(word, stand_in)
    return block


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n == 2 else pytest.mark.slow) for n in range(len(RECIPES))]
)  # the quickest always
def test_a_recipe_works_line_by_line(place: Path, number: int) -> None:
    environ = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    block = "set -ex\n" + typed(RECIPES[number])
    done = subprocess.run(["bash", "-c", block], cwd=place, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for run in (place / "outputs").glob("*"):
        sound(run)


def commands() -> list[str]:
    lines = [line for block in blocks(README) for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line.partition("  #")[0].strip() for line in lines if line.startswith("python -m fluxbatch ")})


@pytest.mark.parametrize("line", [line for line in commands() if "$" not in line])
def test_the_settings_of_each_command_are_real(line: str) -> None:
    verb, *_ = words = shlex.split(line)[3:]
    if verb not in ("manifest", "show", "render", "publish", "jobs", "bench", "--config-dir"):  # words of their own
        composed(*(word for word in words if "=" in word and not word.startswith("job=")))


@pytest.mark.parametrize("row", [row for row in section("Troubleshooting").splitlines() if row.startswith("| `")])
def test_what_troubleshooting_quotes_is_what_the_program_says(row: str) -> None:
    said = "".join(path.read_text() for kind in ("*.py", "*.jinja") for path in PACKAGE.rglob(kind))
    joined = re.sub(r'"\s*\n\s*f?"', "", said)
    quotes = [quote for quote in re.findall(r"`([^`]+)`", row.split("|")[1]) if not quote.endswith((".html", ".json"))]
    assert quotes
    for quote in quotes:
        assert quote in joined, f"no message says {quote!r}"
