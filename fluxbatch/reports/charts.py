"""A report's numbers as small SVG drawings, made with Matplotlib. Knows numbers and names, no files and no run.

SVG without scripts, fonts or addresses: a drawing is part of the page, takes its colours from the page's style
(light and dark) and its letters from the reader's own fonts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PT = 360.0  # about a phone's width, so that letters keep their size there
LINE_HEIGHT_PT, BAR_HEIGHT_PT = 150.0, 18.0
LETTER_PT = 5.8  # of 10 points, about
# Colours that nothing else has: each becomes a variable of the page's style.
FAINT, LINE, ACCENT = "#010101", "#020202", "#030303"
VARIABLES = {FAINT: "var(--faint)", LINE: "var(--line)", ACCENT: "var(--accent)"}
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "fluxbatch", "font.size": 10, "font.family": "sans-serif"}


def line_chart(
    x: Sequence[float], y: Sequence[float | None], *, label: str, x_label: str, marks: Sequence[float] = ()
) -> str:
    """`y` up to each `x`, from 0 on; unknown values are drawn across. `marks`: dashed upright lines at these x.

    Empty for fewer than two known points.
    """
    known = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    if len(known) < 2:
        return ""
    figure, axes = _figure(height=LINE_HEIGHT_PT, left=34, right=10, bottom=32, top=8)
    places = [0.0, *(at for at, _ in known)]
    values = [known[0][1], *(value for _, value in known)]
    axes.fill([0.0, *places, places[-1]], [0.0, *values, 0.0], color=ACCENT, alpha=0.15, linewidth=0, clip_on=False)
    axes.plot(places, values, color=ACCENT, linewidth=1.6, clip_on=False)
    for mark in marks:
        axes.axvline(mark, color=FAINT, linewidth=0.8, linestyle=(0, (3, 3)), clip_on=False)
    axes.set_xlim(0, max(x) or 1)
    axes.set_ylim(0, 1.08 * max(values) or 1)
    axes.set_xlabel(x_label)
    axes.yaxis.grid(True, color=LINE, linewidth=0.7, clip_on=False)
    axes.locator_params(axis="both", nbins=5)
    return _svg(figure, label)


def bar_chart(values: Mapping[str, float | None], *, label: str, form: str = "{:.2f}", top: float | None = None) -> str:
    """One horizontal bar a name, its value written at its end. `top`: the value at the right edge, else the largest.

    None where a value is unknown; empty where all are.
    """
    known = [value for value in values.values() if value is not None]
    if not known:
        return ""
    left = 10 + LETTER_PT * max(map(len, values))
    figure, axes = _figure(height=BAR_HEIGHT_PT * len(values), left=left, right=52, bottom=0, top=0)
    end = max(top or 0.0, *known) or 1.0
    for place, (name, value) in enumerate(values.items()):
        axes.barh(place, end, height=0.55, color=LINE, alpha=0.45, clip_on=False)
        axes.barh(place, value or 0, height=0.55, color=ACCENT, clip_on=False)
        told = "unknown" if value is None else form.format(value)
        axes.text(1.02 * end, place, told, va="center", ha="left", color=FAINT)
        axes.text(-0.02 * end, place, name, va="center", ha="right", color=FAINT)
    axes.set_xlim(0, end)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_axis_off()
    return _svg(figure, label)


def _figure(*, height: float, left: float, right: float, bottom: float, top: float) -> tuple[Figure, Axes]:
    """A drawing of so many points with one set of axes inside these margins."""
    from matplotlib.figure import Figure  # half a second: only where something is drawn

    figure = Figure(figsize=(WIDTH_PT / 72, height / 72))
    width = 1 - (left + right) / WIDTH_PT
    axes = figure.add_axes((left / WIDTH_PT, bottom / height, width, 1 - (bottom + top) / height))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=FAINT, length=0)
    axes.xaxis.label.set_color(FAINT)
    return figure, axes


def _svg(figure: Figure, label: str) -> str:
    """The `<svg>` element alone, in the page's colours, named for those who do not see it."""
    from matplotlib import rc_context

    file = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(STYLE):
        figure.patch.set_visible(False)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        figure.savefig(file, format="svg", metadata=nothing)
    drawing = file.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"\s*<(metadata|defs)>.*?</\1>|\s*<!--.*?-->", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r' id="[^"]*"|font-family: [^;]*; ', "", drawing)  # ids are the same in every drawing
    for colour, variable in VARIABLES.items():
        drawing = drawing.replace(colour, variable)
    size = re.match(r"<svg[^>]*?(viewBox=\"[^\"]*\")", drawing)
    assert size is not None, "Matplotlib writes a viewBox"
    head = f'<svg {size[1]} role="img" aria-label="{label}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + drawing[drawing.index(">") + 1 :].strip()
