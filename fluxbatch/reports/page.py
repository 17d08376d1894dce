"""report.html: a report and a few pictures as one file that needs nothing else. Reads no file, changes no number.

The template escapes every value, for prompts come from anywhere; only our own drawings are let through. There is no
script: pictures and lists open as `<details>`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup
from PIL import Image

from fluxbatch.reports import charts
from fluxbatch.reports.contact_sheet import Sample
from fluxbatch.telemetry.metrics import STAGES
from fluxbatch.telemetry.progress import data_size, duration, one_line

TEMPLATE = "report.html.jinja"
SHOWN_BUCKETS = 20
HANDOVER_WORDS = {
    "prefetch->launch": "GPU, for its next batch",
    "launch->transfer": "copy, for the GPU",
    "transfer->compress": "compression, for pixels",
    "compress->commit": "disk, for files",
}


def render_html(report: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    """The page of a report, with these pictures."""
    pictures = [{"sample": sample, "uri": _data_uri(sample.image)} for sample in samples]
    buckets, more = report["buckets"][:SHOWN_BUCKETS], report["buckets"][SHOWN_BUCKETS:]
    return template().render(
        report=report, pictures=pictures, charts=draw_charts(report), stages=STAGES[1:], buckets=buckets, more=more
    )


@cache
def template() -> jinja2.Template:
    """Compiled once a process."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fluxbatch", "reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "number": number, "bytes": data_size, "one_line": one_line}
    environment.filters |= {"milliseconds": milliseconds, "when": when}
    return environment.get_template(TEMPLATE)


def draw_charts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The drawings that this report has numbers for: each with a title, a sentence, and its SVG."""
    drawn = [*_over_time(report), _buckets(report), *_stages(report)]
    return [{"title": title, "words": words, "svg": Markup(svg)} for title, words, svg in drawn if svg]


Chart = tuple[str, str, str]


def _over_time(report: Mapping[str, Any]) -> list[Chart]:
    points = report["over_time"]
    unit, seconds = _time_unit(points[-1]["worked_s"] if points else 0)
    x = [point["worked_s"] / seconds for point in points]
    label = f"{unit} of work"
    marks = [x[at] for at in _resumed_after(points, report["starts"])]
    resumed = " Dashed: stopped and resumed; pauses are left out." if marks else ""
    rates, use, power = (
        [point[key] for point in points] for key in ("images_per_s", "gpu_utilization_percent", "gpu_power_w")
    )
    return [
        (
            "Images a second",
            f"All ranks together.{resumed}",
            charts.line_chart(x, rates, label="Images a second over time", x_label=label, marks=marks),
        ),
        (
            "GPU use, percent",
            "Share of the time that some kernel ran, by NVML, at the end of each batch.",
            charts.line_chart(x, use, label="GPU use over time", x_label=label, marks=marks),
        ),
        (
            "GPU power, watts",
            "As NVML gives it.",
            charts.line_chart(x, power, label="GPU power over time", x_label=label, marks=marks),
        ),
    ]


def _resumed_after(points: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]) -> list[int]:
    """The points after which a rank started that found rows done."""
    resumes = [start["time"] for start in starts if start.get("rows_done")]
    before = {sum(point["time"] < time for point in points) - 1 for time in resumes}
    return sorted(index for index in before if 0 <= index < len(points) - 1)


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return unit, size
    return "seconds", 1.0


def _buckets(report: Mapping[str, Any]) -> Chart:
    measured = [bucket for bucket in report["buckets"] if bucket["images_per_s"]]
    shown = sorted(measured, key=lambda bucket: -bucket["images"])[:SHOWN_BUCKETS]
    rates = {bucket["bucket"]: bucket["images_per_s"] for bucket in shown}
    left_out = f" The {SHOWN_BUCKETS} largest of {len(measured)}." if len(measured) > SHOWN_BUCKETS else ""
    return (
        "Images a second, by bucket",
        f"Of one rank; a bucket is height x width - steps.{left_out}",
        charts.bar_chart(rates, label="Images a second of each bucket"),
    )


def _stages(report: Mapping[str, Any]) -> list[Chart]:
    busy, waiting = report["occupancy"]["busy"], report["occupancy"]["waiting"]
    named = {HANDOVER_WORDS[handover]: share for handover, share in waiting.items()}
    return [
        (
            "How long each stage was at work",
            "Share of the whole time. Stages overlap, so the shares add up to more than 100 %.",
            charts.bar_chart(busy, label="Share of the time that each stage worked", form="{:.1%}", top=1.0),
        ),
        (
            "Who waited for whom",
            "Share of the time that each receiver stood idle. Near 0 % in the first line: nothing held the GPU up.",
            charts.bar_chart(named, label="Share of the time that each receiver waited", form="{:.1%}", top=1.0),
        ),
    ]


def number(value: float | None, digits: int = 0) -> str:
    """`1,234.5`; a dash for an unknown one."""
    return "–" if value is None else f"{value:,.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Three digits or so. A stage that took next to nothing says `< 0.1`, one that was not measured a dash."""
    if value is None:
        return "–"
    if value < 0.1:
        return "< 0.1"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def when(time: str) -> str:
    """A log's time for people."""
    return time[:19].replace("T", " ") + " UTC"


def _data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=82)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
