"""Puts what a training run or an examination left in its place: model folder, settings, tables of TRAINING.md.

    python -m fluxbatch.tiny.install OUT

OUT is the folder of `fluxbatch.tiny.train`: its model replaces the embedded one, its scores all earlier ones, and its
losses are kept in `losses/`. Or that of `fluxbatch.tiny.examine`, whose scores complete the table. Knows files, no
tensors.
"""

import argparse
import io
import json
import re
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxbatch.tiny import FOLDERS, NAMES
from fluxbatch.tiny.checkpoint import load_pieces
from fluxbatch.tiny.export import weights_digest
from fluxbatch.tiny.record import score_table
from fluxbatch.tiny.scores import completed

CHECKOUT = Path(__file__).parents[2]
MOST_BYTES = 25_000_000


@dataclass(frozen=True)
class Place:
    """Where a checkout holds what belongs to one family's embedded model."""

    folder: Path
    settings: Path
    record: Path
    losses: Path  # of the run that made the weights

    @classmethod
    def of(cls, family: str, checkout: Path = CHECKOUT) -> "Place":
        name = NAMES[family]
        folder = checkout / FOLDERS[name].relative_to(CHECKOUT)
        room = folder.parent
        settings = checkout / "conf" / "model" / f"{name}.yaml"
        return cls(folder, settings, room / "TRAINING.md", room / "losses" / f"{family}.json")


def install_model(out: Path, folder: Path) -> int:
    """Replaces the folder by the one in model.tar.NN; returns its bytes."""
    content = load_pieces(out, "model.tar")
    if content is None:
        raise SystemExit(f"{out} has no model.tar.00: the run was cut off before it packed its model")
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4; the archive is our own
        tar.extractall(aside)
    size = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise SystemExit(f"the model is of {size / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} MB may ship")
    shutil.rmtree(folder, ignore_errors=True)
    (aside / "model").rename(folder)
    aside.rmdir()
    return size


def with_run(text: str, run: dict[str, Any]) -> str:
    """TRAINING.md with a training run as one more line of its runs, and its scores in place of all earlier ones."""
    head, mark, rest = _cut(text, f"<!-- end of the runs of {run['model']} -->")
    scores = score_table(run) if run["scores"] else "No scores: the run had no time left for them."
    return _with_table(head + _run_line(run) + mark + rest, run["model"], scores)


def with_examination(text: str, run: dict[str, Any]) -> str:
    """TRAINING.md with the examination's scores in the table of its model: in place of the same settings' earlier ones,
    or behind all."""
    found, earlier = score_table(run), _table(text, run["model"])
    return _with_table(text, run["model"], completed(earlier, found) if earlier.startswith("|") else found)


def _table(text: str, model: str) -> str:
    _, _, rest = _cut(text, f"<!-- scores of {model} -->")
    return _cut(rest, f"<!-- end of the scores of {model} -->")[0].strip()


def _with_table(text: str, model: str, table: str) -> str:
    head, mark, rest = _cut(text, f"<!-- scores of {model} -->")
    _, end, tail = _cut(rest, f"<!-- end of the scores of {model} -->")
    return f"{head}{mark}\n\n{table}\n\n{end}{tail}"


def _cut(text: str, mark: str) -> tuple[str, str, str]:
    if text.count(mark) != 1:
        raise SystemExit(f"TRAINING.md must have one line {mark}, it has {text.count(mark)}")
    return text.partition(mark)


def losses_of(run: dict[str, Any]) -> str:
    """The loss curve and throughput of a run, and what it was a run of, as JSON."""
    kept = {name: run[name] for name in ("device", "torch", "trained_s", "samples", "losses")}
    return json.dumps({"command": _command(run)} | kept, indent=1) + "\n"


def _command(run: dict[str, Any]) -> str:
    given = run["arguments"]
    return (
        f"python -m fluxbatch.tiny.train --minutes {given['minutes']} --model {run['model']} --from {given['source']}"
    )


def _run_line(run: dict[str, Any]) -> str:
    rates = [line["samples_per_s"] for line in run["losses"] if line["stage"] == "flow"]
    flow = [line["loss"] for line in run["losses"] if line["stage"] == "flow"]
    rate = sorted(rates)[len(rates) // 2]
    return (
        f"| `{_command(run)}` | {run['device']}, torch {run['torch']} | {run['trained_s'] / 60:.1f} | "
        f"{run['samples'] / 1e6:.1f} M | {rate:,.0f} | {flow[0]:.3f} to {flow[-1]:.3f} |\n"
    )


def with_text_length(settings: str, folder: Path) -> str:
    """The settings of a model folder, padding captions as its training did."""
    length = json.loads((folder / "defaults.json").read_text())["max_sequence_length"]
    changed, count = re.subn(r"(?m)^max_sequence_length: \d+$", f"max_sequence_length: {length}", settings)
    if count != 1:
        raise SystemExit(f"conf/model must have one line with a max_sequence_length, it has {count}")
    return changed


def install(out: Path, checkout: Path = CHECKOUT) -> str:
    """Returns what was done, in words."""
    run = json.loads((out / "run.json").read_text())
    place = Place.of(run["model"], checkout)
    if "weights" in run:
        return install_scores(run, place)
    record = with_run(place.record.read_text(), run)
    size = install_model(out, place.folder)
    place.record.write_text(record)
    place.settings.write_text(with_text_length(place.settings.read_text(), place.folder))
    place.losses.parent.mkdir(exist_ok=True)
    place.losses.write_text(losses_of(run))
    return f"{place.folder}: {size / 1e6:.1f} MB; {place.record.name}: one more run, {len(run['scores'])} settings"


def install_scores(run: dict[str, Any], place: Place) -> str:
    if run["weights"] != weights_digest(place.folder):
        raise SystemExit(f"the examination was of other weights than those in {place.folder}")
    place.record.write_text(with_examination(place.record.read_text(), run))
    return f"{place.record.name}: scores of {len(run['scores'])} settings"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of a training run or an examination")
    parser.add_argument("--checkout", type=Path, default=CHECKOUT, help="where to; else the one that this is run from")
    args = parser.parse_args()
    print(install(args.out, args.checkout.resolve()))


if __name__ == "__main__":
    main()
