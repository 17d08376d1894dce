"""Judges the images of a run folder against their prompts: python -m fluxbatch.tiny.score outputs/demo

Knows how to open a run folder (as anyone does, with datasets) and how to ask the judge; decides nothing itself.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fluxbatch.tiny.judge import Checks, judge
from fluxbatch.tiny.reader import read_caption


def pictures(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(prompt, (H, W, 3) float32 in 0..1) of every written row, whatever the output format."""
    from datasets import load_dataset

    for split in load_dataset(str(folder), streaming=True).values():
        for row in split:
            yield row["prompt"], np.asarray(row["image"].convert("RGB"), np.float32) / 255


def verdicts(rows: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, Checks]]:
    """(prompt, its checks); no checks where the prompt is not of the little language or has a scenery."""
    for prompt, pixels in rows:
        scene = read_caption(prompt)
        yield prompt, judge(pixels, scene) if scene else {}


def summary(judged: Iterable[tuple[str, Checks]]) -> dict:
    """Rows judged, unjudged and right in all; share of each check; the prompts that went wrong, with what did."""
    checks: dict[str, list[bool]] = {}
    wrong: list[dict] = []
    rows = {"judged": 0, "unjudged": 0, "right": 0}
    for prompt, found in judged:
        rows["judged" if found else "unjudged"] += 1
        rows["right"] += bool(found) and all(found.values())
        for name, right in found.items():
            checks.setdefault(name, []).append(right)
        if not all(found.values()):
            wrong.append({"prompt": prompt, "failed": [name for name, right in found.items() if not right]})
    shares = {name: round(sum(right) / len(right), 4) for name, right in checks.items()}
    return rows | {"checks": shares, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    found = summary(verdicts(pictures(args.folder)))
    if args.json:
        print(json.dumps(found))
        return
    print(f"judged: {found['judged']}  right: {found['right']}  not judged: {found['unjudged']}")
    for name, share in found["checks"].items():
        print(f"{name}: {share:.3f}")
    for miss in found["wrong"]:
        print(f"wrong ({', '.join(miss['failed'])}): {miss['prompt']}")


if __name__ == "__main__":
    main()
