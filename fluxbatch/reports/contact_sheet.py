"""A few pictures of each bucket, small, for people's eyes. Reads only the images it shows; judges none of them."""

from __future__ import annotations

import io
import logging
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont, ImageOps

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import writers
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan.cut import PlanPart
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

MAX_SAMPLES = 48
THUMB_PX = 192  # on the sheet
PREVIEW_PX = 384  # on a page, where a picture can be opened
SHOWN = ("id", "prompt", "bucket")  # and these, where a picture is opened:
SETTINGS = ("negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "seed")
COLUMNS = 8
MARGIN_PX = 16
LINE_PX = 17
CAPTION_LINES = 2  # of the prompt; the bucket has a line of its own
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
GROUND, INK, FAINT_INK = "#e8e8e8", "#1a1a1a", "#6a6a6a"


@dataclass(frozen=True, slots=True)
class Sample:
    """One row to show. `image` fits a square of PREVIEW_PX pixels; `settings` are the row's own, and its shard."""

    id: str
    prompt: str
    bucket: str
    image: Image.Image
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of one bucket in one committed shard; `first_row` counts inside the shard."""

    bucket: str
    shard: int
    first_row: int
    num_rows: int


def take_samples(
    folder: RunFolder, plan: RunPlan, ledger: Ledger, *, image_format: str, limit: int = MAX_SAMPLES
) -> list[Sample]:
    """At most `limit` written rows, the same number of each bucket where there are enough, evenly spread over it."""
    samples = []
    for shard, wanted in _by_shard(_choose(committed_stretches(plan, ledger), limit)):
        try:
            rows = _written_rows(folder, plan, ledger, shard)
            picked = [row for at in wanted if (row := _nearest(rows, *at)) is not None]
            samples += _read_samples(folder, ledger, shard, picked, image_format=image_format)
        except (FluxbatchError, OSError, KeyError, ValueError, pa.ArrowException, tarfile.TarError) as error:
            log.warning("no pictures of shard %d in the contact sheet: %s", shard, error)
    return samples


def committed_stretches(plan: RunPlan, ledger: Ledger) -> dict[str, list[Stretch]]:
    """Where each bucket's written rows lie, in plan order."""
    found: dict[str, list[Stretch]] = {}
    for part in plan.parts:
        for stretch in _stretches(part):
            if any(line.rows for line in ledger.commits.get(stretch.shard, ())):
                found.setdefault(stretch.bucket, []).append(stretch)
    return found


def _stretches(part: PlanPart) -> Iterator[Stretch]:
    start, size = 0, part.shard_size
    for run in part.runs:
        stop = start + run.num_rows
        for shard in range(start // size, -(-stop // size)):
            first, last = max(start, shard * size), min(stop, (shard + 1) * size)
            yield Stretch(run.bucket.name, part.first_shard + shard, first - shard * size, last - first)
        start = stop


def _choose(stretches: Mapping[str, list[Stretch]], limit: int) -> Iterator[tuple[Stretch, int]]:
    """The chosen rows, each as its stretch and its place in the shard."""
    totals = {bucket: sum(stretch.num_rows for stretch in found) for bucket, found in stretches.items()}
    for bucket, share in fair_shares(totals, limit).items():
        ends = np.cumsum([stretch.num_rows for stretch in stretches[bucket]])
        for place in ((2 * i + 1) * totals[bucket] // (2 * share) for i in range(share)):
            index = int(np.searchsorted(ends, place, side="right"))
            stretch = stretches[bucket][index]
            yield stretch, stretch.first_row + place - int(ends[index] - stretch.num_rows)


def fair_shares(totals: Mapping[str, int], limit: int) -> dict[str, int]:
    """How many of each bucket to show: one more for each in turn, until `limit`; small buckets leave room to others."""
    shares = dict.fromkeys(totals, 0)
    while sum(shares.values()) < limit and shares != dict(totals):
        for bucket in shares:
            if shares[bucket] < totals[bucket] and sum(shares.values()) < limit:
                shares[bucket] += 1
    return {bucket: share for bucket, share in shares.items() if share}


def _by_shard(chosen: Iterator[tuple[Stretch, int]]) -> list[tuple[int, list[tuple[Stretch, int]]]]:
    """In the order of the plan: each shard is opened once."""
    shards: dict[int, list[tuple[Stretch, int]]] = {}
    for stretch, row in chosen:
        shards.setdefault(stretch.shard, []).append((stretch, row))
    return sorted(shards.items())


def _written_rows(folder: RunFolder, plan: RunPlan, ledger: Ledger, shard: int) -> pa.Table:
    """The shard's rows in the plan, with a column that says which of them have an image."""
    planned = plan.shard(shard)
    rows = plan.rows(planned).select([*SHOWN, *SETTINGS])
    lines = [line for line in ledger.commits[shard] if line.failed]
    failed = [row_id for line in lines for row_id in writers.stored_ids(folder.root / line.file)]
    without = [*failed, *(rows["id"][place].as_py() for place in planned.dropped)]
    written = pc.invert(pc.is_in(rows["id"], value_set=pa.array(without, pa.string())))
    return rows.append_column("written", written)


def _nearest(rows: pa.Table, stretch: Stretch, row: int) -> dict[str, Any] | None:
    """The row, or the nearest one of its stretch that has an image."""
    written = np.flatnonzero(rows["written"].slice(stretch.first_row, stretch.num_rows).to_numpy())
    if not len(written):
        return None
    nearest = written[np.argmin(np.abs(written + stretch.first_row - row))]
    return rows.slice(stretch.first_row + int(nearest), 1).to_pylist()[0]


def _read_samples(
    folder: RunFolder, ledger: Ledger, shard: int, rows: Sequence[dict[str, Any]], *, image_format: str
) -> list[Sample]:
    unique = {row["id"]: row for row in rows}
    [path] = {folder.root / line.file for line in ledger.commits[shard] if line.rows}
    images = read_images(path, list(unique), image_format=image_format)
    return [_sample(unique[row_id], _preview(image), shard=path) for row_id, image in images]


def _sample(row: dict[str, Any], image: Image.Image, *, shard: Path) -> Sample:
    settings = {name: row[name] for name in SETTINGS if row[name] is not None}
    name = shard.parent.name if shard.name == writers.METADATA else shard.name
    return Sample(row["id"], row["prompt"], row["bucket"], image, settings | {"shard": name})


def read_images(path: Path, ids: Sequence[str], *, image_format: str) -> Iterator[tuple[str, bytes]]:
    """The images of some rows, and no others, out of a Parquet file, a tar or the folder of a metadata.jsonl."""
    if path.suffix == ".parquet":
        yield from _from_parquet(path, ids)
        return
    names = {row_id: f"{writers.safe_key(row_id)}.{writers.EXTENSION[image_format]}" for row_id in ids}
    if path.suffix == ".tar":
        with path.open("rb") as source, tarfile.open(fileobj=source, mode="r:") as tar:  # steps from header to header
            for row_id, name in names.items():
                file = tar.extractfile(name)
                assert file is not None, f"{name} in {path} is no file"
                yield row_id, file.read()
    else:
        for row_id, name in names.items():
            yield row_id, path.with_name(name).read_bytes()


def _from_parquet(path: Path, ids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    wanted = pa.array(ids, pa.string())
    with path.open("rb") as source, pq.ParquetFile(source) as file:
        for group in range(file.num_row_groups):
            found = pc.is_in(file.read_row_group(group, columns=["id"])["id"], value_set=wanted)
            if pc.any(found).as_py():
                for row in file.read_row_group(group, columns=["id", "image.bytes"]).filter(found).to_pylist():
                    yield row["id"], row["image"]["bytes"]


def _preview(content: bytes) -> Image.Image:
    with Image.open(io.BytesIO(content)) as image:
        side_px = min(PREVIEW_PX, max(THUMB_PX, *image.size))
        image.draft("RGB", (2 * side_px, 2 * side_px))  # a JPEG is decoded at a fraction of its size
        return ImageOps.contain(image.convert("RGB"), (side_px, side_px), Image.Resampling.LANCZOS)


def draw_sheet(samples: Sequence[Sample]) -> Image.Image:
    """All samples on one sheet of COLUMNS columns, each with its prompt and its bucket below."""
    columns = max(1, min(COLUMNS, len(samples)))
    step_x, step_y = THUMB_PX + MARGIN_PX, THUMB_PX + MARGIN_PX + (CAPTION_LINES + 1) * LINE_PX
    size = (MARGIN_PX + columns * step_x, MARGIN_PX + max(1, -(-len(samples) // columns)) * step_y)
    sheet = Image.new("RGB", size, GROUND)
    for index, sample in enumerate(samples):
        row, column = divmod(index, columns)
        _draw_sample(sheet, sample, x=MARGIN_PX + column * step_x, y=MARGIN_PX + row * step_y)
    return sheet


def _draw_sample(sheet: Image.Image, sample: Sample, *, x: int, y: int) -> None:
    """The thumb in the middle of its cell's floor, so that captions stand right below."""
    font, pen = ImageFont.load_default(13), ImageDraw.Draw(sheet)
    thumb = ImageOps.contain(sample.image, (THUMB_PX, THUMB_PX), Image.Resampling.LANCZOS)
    sheet.paste(thumb, (x + (THUMB_PX - thumb.width) // 2, y + THUMB_PX - thumb.height))
    lines = wrap(sample.prompt, font=font, width_px=THUMB_PX, max_lines=CAPTION_LINES)
    for number, text in enumerate(lines):
        pen.text((x, y + THUMB_PX + 3 + number * LINE_PX), text, font=font, fill=INK)
    below = y + THUMB_PX + 3 + len(lines) * LINE_PX
    pen.text((x, below), sample.bucket, font=ImageFont.load_default(12), fill=FAINT_INK)


def wrap(text: str, *, font: Font, width_px: int, max_lines: int) -> list[str]:
    """The text's beginning in lines that fit, broken between words where it can be; an ellipsis where it goes on."""
    rest = " ".join(text[:500].split())
    lines: list[str] = []
    while rest and len(lines) < max_lines:
        line = _fitting(rest, font=font, width_px=width_px)
        last = len(lines) == max_lines - 1
        if last and len(line) < len(rest):
            line = _fitting(rest, font=font, width_px=width_px - font.getlength("…")) + "…"
        lines.append(line)
        rest = rest[len(line) :].lstrip()
    return lines


def _fitting(text: str, *, font: Font, width_px: float) -> str:
    fits = bisect_right(range(len(text) + 1), width_px, key=lambda length: font.getlength(text[:length])) - 1
    end = max(fits, 1)
    space = text.rfind(" ", 0, end + 1)
    return text[:end] if end == len(text) or space <= 0 else text[:space]
