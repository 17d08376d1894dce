"""The report's page: its drawings, and how a real browser shows it (where there is one)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fluxbatch.reports import charts, page
from fluxbatch.reports.contact_sheet import Sample
from fluxbatch.telemetry import throughput
from fluxbatch.telemetry.metrics import HANDOVERS, STAGES

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def made_up_report(*, buckets: int = 2) -> dict[str, Any]:
    """A report of a run that stopped once, with everything in it that a page shows."""
    shapes = [
        {
            "bucket": f"{16 * n}x64-4", "rows": 40, "images": 40, "images_per_s": 2.0 + n, "out_of_memory_splits": 1,
            "ms_per_image": dict.fromkeys(STAGES, 0.004) | {"denoise": 480.0, "decode": None},
            "gpu_joules_per_image": 300.0, "peak_reserved_gib": 40.5, "warm_up_s": 12.0,
        }
        for n in range(buckets)
    ]  # fmt: skip
    times = [f"2026-01-31T0{n}:00:00.000+00:00" for n in range(8)]
    points = [
        {"worked_s": 3600.0 * n, "time": time, "images_per_s": 2.0, "gpu_utilization_percent": None if n else 99.0,
         "gpu_power_w": 650.0 + n}
        for n, time in enumerate(times)
    ]  # fmt: skip
    start = {"time": times[0], "rank": 0, "host": "a-node-with-a-long-name-0017", "gpu": None, "batches_to_make": 9}
    return {
        "run": "a run with quite a long name, " * 4,
        "rows": 100, "written": 96, "failed": 1, "rejected": 2, "pending": 1,
        "complete": False, "bytes": 1_000_000, "buckets": shapes, "over_time": points,
        "totals": throughput.totals(throughput.SCHEMA.empty_table())
        | {"gpu_joules": 1e6, "gpu_joules_per_image": 300.0},
        "occupancy": {"busy": dict.fromkeys(STAGES, 0.5), "waiting": dict.fromkeys(HANDOVERS, 0.01)},
        "failed_by_reason": {"denoise: non_finite": 1}, "rejected_by_reason": {"bad_size": 2},
        "examples": {"denoise: non_finite": "latents", "bad_size": "height " * 60},
        "listed": {
            "denoise: non_finite": [{"id": "x" * 200, "attempts": 1, "message": "latents"}],
            "bad_size": [{"id": None, "row": 7, "message": "height " * 60}],
        },
        "starts": [{**start, "rows_done": 0}, {**start, "time": times[4], "rows_done": 48}],
        "rows_made_again": 4, "plan_parts": [{"kind": "rows", "rows": 97}, {"kind": "retry", "rows": 1}],
        "changes": [{"recorded": times[5], "settings": {"output.quality": {"was": 90, "is": 95}}}],
        "settings": {
            "model": {"name": "tiny", "path": "/a" * 200}, "output": {"kind": "parquet", "image_format": "png"},
        },
        "reuse": {"from": "/runs/" + "y" * 200, "reused": 90, "changed": 7, "examples": {"changed": ["x" * 90] * 3}}
        | dict.fromkeys(("added", "removed", "unwritten"), 0),
        "version": "0.1.0", "versions": {"torch": "2.11.0"},
    }  # fmt: skip


def html(**kwargs: Any) -> str:
    image = Image.new("RGB", (384, 200), "#7030a0")
    samples = [Sample(f"id-{n}", "a prompt " * 40, "64x64-4", image, {"seed": n}) for n in range(6)]
    return page.render_html(made_up_report(**kwargs), samples)


def test_a_drawing_takes_its_colours_and_letters_from_the_page() -> None:
    drawn = charts.line_chart([1, 2, 3], [1.0, None, 2.0], label="images a second", x_label="hours", marks=[1.5])
    assert drawn.startswith("<svg viewBox=") and 'aria-label="images a second"' in drawn and "hours</text>" in drawn
    assert "var(--accent)" in drawn and "#0" not in drawn and "font-family" not in drawn
    assert not any(word in drawn for word in ("<script", "url(", "<style", "href=", " id="))


def test_too_little_to_draw_draws_nothing() -> None:
    assert charts.line_chart([], [], label="", x_label="") == charts.line_chart([1], [1.0], label="", x_label="") == ""
    assert charts.line_chart([1, 2], [None, None], label="", x_label="") == ""
    assert charts.bar_chart({}, label="") == charts.bar_chart({"denoise": None}, label="") == ""


def test_a_bar_says_its_value_and_an_unknown_one_that_it_is() -> None:
    drawn = charts.bar_chart({"denoise": 0.9731, "encode": None, "decode": 0.0}, label="x", form="{:.1%}", top=1.0)
    assert "97.3%</text>" in drawn and "unknown</text>" in drawn and "0.0%</text>" in drawn


def test_more_than_twenty_buckets_are_summed_up() -> None:
    text = html(buckets=25)
    assert "And 5 smaller ones with 200 rows" in text and "The 20 largest of 25." in text
    assert ">304x64-4</td>" in text and ">320x64-4</td>" not in text


def test_hidden_and_unmeasured_stages_read_sensibly() -> None:
    assert [page.milliseconds(value) for value in (None, 0.0, 0.004, 3.14, 2571.3)] == [
        "–", "< 0.1", "< 0.1", "3.1", "2,571",
    ]  # fmt: skip


def test_the_page_tells_what_a_resume_and_a_retry_did() -> None:
    text = html()
    assert "4 rows were made a second time" in text and "1 row was tried again after failing" in text
    assert "Dashed: stopped and resumed" in text and text.count("stroke-dasharray") == 2  # power has points, use one


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.parametrize("width, height", [(1280, 900), (390, 844), (320, 640)])
@pytest.mark.parametrize("scheme, ground", [("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 22, 21)")])
def test_a_browser_shows_it_whole_without_asking_anybody(
    browser: Any, tmp_path: Path, width: int, height: int, scheme: str, ground: str
) -> None:
    (tmp_path / "report.html").write_text(html())
    view = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    asked: list[str] = []
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: asked.append(message.text))
    view.goto(f"file://{tmp_path}/report.html")
    view.locator(".pictures summary").nth(1).click()
    view.locator(".pictures summary").nth(4).click()
    assert view.locator(".pictures details[open]").count() == 1, "one picture is open at a time"
    assert view.locator(".pictures details[open] .about").is_visible()
    for row in view.locator("details.list > summary").all():
        row.click()
    assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the right"
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    assert all(url.startswith(("data:", f"file://{tmp_path}")) for url in asked)
    view.close()
