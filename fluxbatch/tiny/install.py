"""Puts what a training run left in its place: the model folder, and the tables of TRAINING.md.

    python -m fluxbatch.tiny.install OUT

OUT is the folder of `fluxbatch.tiny.train`; its model.tar.NN, run.json and sheet.png are read. Knows files, no tensors.
"""

import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

from fluxbatch.tiny import FOLDER
from fluxbatch.tiny.checkpoint import load_pieces

FOLDERS = {"flux1": FOLDER, "flux2": FOLDER.parent / "model_flux2"}
RECORD = FOLDER.parent / "TRAINING.md"
SETTINGS = FOLDER.parent.parent.parent / "conf" / "model" / "tiny.yaml"
MOST_BYTES = 25_000_000


def install_model(out: Path, folder: Path) -> int:
    """Replaces the folder by the one in model.tar.NN; returns its bytes."""
    content = load_pieces(out, "model.tar")
    if content is None:
        raise SystemExit(f"{out} has no model.tar.00: the run was cut off before it packed its model")
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(aside, filter="data")
    size = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise SystemExit(f"the model is of {size / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} MB may ship")
    shutil.rmtree(folder, ignore_errors=True)
    (aside / "model").rename(folder)
    aside.rmdir()
    return size


def with_run(text: str, run: dict[str, Any]) -> str:
    """TRAINING.md with the run as one more line of its first table and with its scores in place of the earlier ones."""
    model = run["model"]
    text = _before(text, f"<!-- end of the runs of {model} -->", _run_line(run))
    start, end = f"<!-- scores of {model} -->\n", f"<!-- end of the scores of {model} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return before + start + _score_table(run["scores"]) + end + after


def _before(text: str, mark: str, line: str) -> str:
    if mark not in text:
        raise SystemExit(f"{RECORD} has no line {mark}")
    return text.replace(mark, line + mark)


def _run_line(run: dict[str, Any]) -> str:
    given = run["arguments"]
    command = (
        f"`python -m fluxbatch.tiny.train --minutes {given['minutes']} --model {run['model']} --from {given['source']}`"
    )
    rates = [line["samples_per_s"] for line in run["losses"] if line["stage"] == "flow"]
    flow = [line["loss"] for line in run["losses"] if line["stage"] == "flow"]
    rate = sorted(rates)[len(rates) // 2]
    return (
        f"| {command} | {run['device']}, torch {run['torch']} | {run['trained_s'] / 60:.1f} | "
        f"{run['samples'] / 1e6:.1f} M | {rate:,.0f} | {flow[0]:.3f} to {flow[-1]:.3f} |\n"
    )


def _score_table(scores: dict[str, dict[str, float]]) -> str:
    from fluxbatch.tiny.examine import table

    return "\n" + table(scores) + "\n\n"


def with_text_length(settings: str, folder: Path) -> str:
    """The settings of a model folder, padding captions as its training did."""
    length = json.loads((folder / "defaults.json").read_text())["max_sequence_length"]
    changed, count = re.subn(r"(?m)^max_sequence_length: \d+$", f"max_sequence_length: {length}", settings)
    if count != 1:
        raise SystemExit(f"{SETTINGS} has {count} lines with a max_sequence_length, not one")
    return changed


def main(out: Path) -> None:
    run = json.loads((out / "run.json").read_text())
    record = with_run(RECORD.read_text(), run)
    folder = FOLDERS[run["model"]]
    size = install_model(out, folder)
    RECORD.write_text(record)
    if folder == FOLDER:
        SETTINGS.write_text(with_text_length(SETTINGS.read_text(), folder))
    print(f"{FOLDERS[run['model']]}: {size / 1e6:.1f} MB; {RECORD.name}: one more run, {len(run['scores'])} settings")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
