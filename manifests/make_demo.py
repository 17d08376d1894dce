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
        Row("red circle #1", "a red circle on a white background", "128x128", 20, 3.5, 9),
        Row("red circle #2", "a red circle on a white background", "128x128", 20, 3.5, 10),
        Row("blue.square.v2", "a blue square on a yellow background", "128x128", 20, 3.5, 7),
        Row("shapes/triangle/green", "a green triangle", "128x128", 12, 3.5, 11),
        Row("\N{PURPLE HEART} heart", "a purple heart on a pink background", "128x128", 12, 3.5, 3),
        Row("it's a diamond", "a cyan diamond on a black background", "128x128", 12, 3.5, 8),
        Row('the "ring"', "an orange ring on a white background", "128x128", 12, 3.5, 4),
        Row("hexagon", "a green hexagon on an orange background", "128x128", 8, 2.5),
        Row("crescent", "a yellow crescent on a purple background", "128x128", 8, 2.5, 9),
        Row("diamond", "a white diamond on a red background", "128x128", 8, 2.5),
        Row("\u5186-0001", "a pink circle on a black background", "128x128", 8, 4.5),
    ),
    "place": (
        Row("top left", "a red square in the top left corner", "192x192", 20, 3.5, 39),
        Row("top right", "a blue circle in the top right corner", "192x192", 20, 3.5, 32),
        Row("bottom left", "a green triangle in the bottom left corner", "192x192", 20, 3.5, 33),
        Row("bottom right", "a purple square in the bottom right corner", "192x192", 20, 3.5, 34),
        Row("left, wide", "a blue circle on the left on a white background", "96x160", 12, 3.5, 35),
        Row("right, wide", "a red circle on the right on a white background", "96x160", 12, 3.5, 36),
        Row("top, tall", "an orange circle at the top on a white background", "160x96", 12, 3.5, 37),
        Row("bottom, tall", "a green square at the bottom on a white background", "160x96", 12, 3.5, 38),
    ),
    "size": (
        Row("small", "a small red heart on a white background", "112x144", 8, 2.5, 41),
        Row("huge", "a huge purple square on a yellow background", "112x144", 8, 4.5, 44),
    ),
    "pair": (
        Row("pair 1", "a red square and a blue square on a white background", "96x160", 12, 3.5, 51),
        Row("pair 2", "a green circle next to an orange circle", "96x160", 12, 3.5, 52),
        Row("pair 3", "a green circle above an orange circle on a white background", "160x96", 12, 3.5, 53),
        Row("pair 4", "a blue square above a yellow square", "160x96", 12, 3.5, 54),
        Row("two", "two red circles on a white background", "192x320", 12, 3.5, 55),
        Row("four", "four red squares on a blue background", "128x128", 20, 4.5, 56),
        Row("inside", "a yellow circle inside a pink square", "128x128", 20, 4.5, 57),
        Row("inside out", "a red heart in a white circle on a black background", "128x128", 20, 4.5, 58),
    ),
    "scene": (
        Row("night", "a yellow crescent at night", "144x112", 20, 3.5, 61),
        Row("snow", "a red square in the snow", "144x112", 20, 3.5, 62),
        Row("underwater", "an orange circle under water", "144x112", 20, 3.5, 63),
        Row("space", "a cyan circle in space", "144x112", 20, 3.5, 64),
        Row("meadow", "a purple star on the grass", "256x256", 20, 3.5, 66),
        Row("desert", "a green square in the desert", "256x256", 20, 3.5, 68),
        Row("night, wide", "a white circle under the stars at night", "192x320", 12, 3.5, 71),
        Row("snow, tall", "a purple circle in the snow", "320x192", 12, 3.5, 73),
        Row("meadow, tall", "a red circle in a meadow", "320x192", 12, 3.5, 74),
    ),
    "thing": (
        Row("fox.v1", "a fox in the snow", "128x128", 20, 3.5, 4),
        Row("rocket", "a rocket in space", "128x128", 20, 3.5, 5),
        Row("penguins \N{PENGUIN}", "two penguins in the snow", "128x128", 20, 3.5, 6),
        Row("castle", "a castle at sunset", "128x128", 20, 3.5, 7),
        Row("dinosaur", "a green dinosaur in the desert", "128x128", 20, 3.5, 8),
        Row("ghost", "a ghost at night", "128x128", 20, 3.5, 9),
        Row("frog/green", "a green frog", "128x128", 20, 3.5, 10),
        Row("stars", "three yellow stars at night", "128x128", 20, 3.5, 11),
    ),
    "negative": (
        Row("not red", "a triangle on a white background", "128x128", 20, 3.5, 91, "a red triangle"),
        Row("not at night", "a yellow square", "128x128", 20, 3.5, 92, "at night"),
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
