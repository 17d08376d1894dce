"""Write demo.parquet: 48 prompts in the embedded model's little language, for `python -m fluxbatch job=demo`.

    python manifests/make_demo.py [PATH]

Everything a manifest may say is in it: ids that are no file names, rows with and without a seed, several sizes, steps
and guidance scales, negative prompts, and a column of its own (`category`) that is carried through to the images. No
clock and no chance: the same rows every time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("negative_prompt", pa.string()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("num_inference_steps", pa.int32()),
        pa.field("guidance_scale", pa.float64()),
        pa.field("seed", pa.int64()),
        pa.field("category", pa.string()),
    ]
)


class Row(NamedTuple):
    """One line of the table below. `size` is height x width; no `seed`: derived from the id."""

    id: str
    prompt: str
    size: str
    steps: int
    guidance: float
    seed: int | None = None
    negative_prompt: str | None = None


ROWS: dict[str, tuple[Row, ...]] = {
    "shape": (
        Row("red circle #1", "a red circle on a white background", "192x192", 8, 3.5, 9),
        Row("red circle #2", "a red circle on a white background", "192x192", 8, 3.5, 10),
        Row("blue.square.v2", "a blue square on a yellow background", "192x192", 8, 3.5, 7),
        Row("shapes/triangle/green", "a green triangle", "192x192", 8, 3.5, 11),
        Row("\N{PURPLE HEART} heart", "a purple heart on a pink background", "192x192", 8, 3.5, 3),
        Row("it's a diamond", "a cyan diamond on a black background", "192x192", 8, 3.5, 8),
        Row('the "ring"', "an orange ring on a white background", "192x192", 8, 3.5, 4),
        Row("hexagon", "a green hexagon on an orange background", "128x128", 4, 2.5),
        Row("crescent", "a yellow crescent on a purple background", "128x128", 4, 2.5, 9),
        Row("\u5186-0001", "a pink circle on a black background", "128x128", 4, 4.5),
    ),
    "place": (
        Row("top left", "a red square in the top left corner", "128x128", 4, 3.5, 39),
        Row("bottom right", "a purple star in the bottom right corner", "128x128", 4, 3.5, 34),
        Row("left, wide", "a blue circle on the left on a white background", "96x160", 8, 3.5, 35),
        Row("top, tall", "an orange diamond at the top on a white background", "160x96", 8, 3.5, 37),
        Row("small", "a small red heart on a white background", "112x144", 8, 2.5, 41),
        Row("huge", "a huge purple square on a yellow background", "112x144", 8, 4.5, 44),
    ),
    "count": (
        Row("two", "two red circles on a white background", "96x160", 8, 3.5, 55),
        Row("three", "three yellow stars at night", "192x192", 8, 3.5, 11),
        Row("four", "four pink diamonds on a blue background", "192x192", 8, 3.5, 56),
        Row("four apples", "four apples on a white background", "192x192", 8, 3.5, 57),
    ),
    "pair": (
        Row("left of", "a red triangle to the left of a green star", "192x192", 8, 3.5, 51),
        Row("right of", "a brown hexagon to the right of a cyan heart", "192x192", 8, 3.5, 52),
        Row("above", "a purple cross above an orange circle", "192x192", 8, 3.5, 53),
        Row("below", "a black diamond below a yellow ring on a pink background", "192x192", 8, 3.5, 54),
        Row("inside", "a yellow heart inside a purple hexagon", "192x192", 8, 4.5, 58),
        Row("penguins \N{PENGUIN}", "a penguin and a snowman in the snow", "192x192", 8, 3.5, 6),
        Row("cat above dog", "a cat above a dog", "192x192", 8, 3.5, 59),
        Row("owl", "an owl above a pumpkin at night", "192x192", 8, 3.5, 60),
    ),
    "tint": (
        Row("cat, purple", "a purple cat in a meadow", "192x192", 8, 3.5, 61),
        Row("frog/blue", "a blue frog on a white background", "192x192", 8, 3.5, 62),
        Row("car", "a red car on the beach", "192x192", 8, 3.5, 63),
        Row("umbrella", "a green umbrella", "192x192", 8, 3.5, 64),
    ),
    "thing": (
        Row("fox.v1", "a fox in the snow", "192x192", 8, 3.5, 4),
        Row("rocket", "a rocket in space", "192x192", 8, 3.5, 5),
        Row("castle", "a castle at sunset", "192x192", 8, 3.5, 7),
        Row("dinosaur", "a dinosaur in the desert", "192x192", 8, 3.5, 8),
        Row("ghost", "a ghost at night", "192x192", 8, 3.5, 9),
        Row("pizza", "a huge pizza", "192x192", 8, 3.5, 10),
    ),
    "scene": (
        Row("fish, wide", "an orange fish under water", "192x320", 8, 3.5, 71),
        Row("boat, wide", "a boat at sunset", "192x320", 8, 3.5, 72),
        Row("tree, tall", "a pine tree in the snow", "320x192", 8, 3.5, 73),
        Row("balloon, tall", "a red balloon on the grass", "320x192", 8, 3.5, 74),
        Row("sunflower", "a sunflower in a meadow", "256x256", 20, 3.5, 66),
        Row("house", "a house in the desert", "256x256", 20, 3.5, 68),
    ),
    "negative": (
        Row("not red", "a triangle on a white background", "128x128", 20, 3.5, 91, "a red triangle"),
        Row("not at night", "a yellow square", "128x128", 20, 3.5, 92, "at night"),
    ),
    "beyond": (  # what it was never taught
        Row("seven", "seven green squares", "192x192", 8, 3.5, 81),
        Row("portrait", "an old woman reading the newspaper", "192x192", 8, 3.5, 82),
    ),
}


def demo_table() -> pa.Table:
    """The rows as a manifest."""
    return pa.Table.from_pylist([_record(row, category) for category, rows in ROWS.items() for row in rows], SCHEMA)


def _record(row: Row, category: str) -> dict[str, object]:
    height, width = (int(side) for side in row.size.split("x"))
    return {
        "id": row.id,
        "prompt": row.prompt,
        "negative_prompt": row.negative_prompt,
        "height": height,
        "width": width,
        "num_inference_steps": row.steps,
        "guidance_scale": row.guidance,
        "seed": row.seed,
        "category": category,
    }


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("demo.parquet")
    pq.write_table(demo_table(), path, compression="zstd")
    print(f"{path}: {demo_table().num_rows} rows")
