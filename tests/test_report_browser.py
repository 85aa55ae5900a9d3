"""The report in a real browser: Debian's Chromium, headless."""

import json
import shutil

import pytest

from eagle3 import pages, report, runs, sections
from tests.browser import browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium"),
]
BOXES = """[...document.querySelectorAll("svg")].filter(s => s.checkVisibility()).map(s => {
    const box = s.getBoundingClientRect(); return [s.getAttribute("aria-label"), box.width, box.height] })"""
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll") && !e.closest("svg")
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""
OVERLAPS = """[...document.querySelectorAll("svg[role=img]")].flatMap(s => {
    const ends = [...s.querySelectorAll("text.end")].map(t => t.getBoundingClientRect());
    return ends.filter((a, k) => ends.some((b, n) => n > k && Math.abs(a.top - b.top) < 0.7 * a.height)) }).length"""


@pytest.fixture(scope="module")
def html(finished_run, tmp_path_factory):
    """The report of a finished run, every part unfolded."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    pages.write(path, report.page(report.open_run(finished_run, None, False)).replace("<details", "<details open"))
    return path


@pytest.fixture(scope="module")
def bare(finished_run, tmp_path_factory):
    """The report of a run of which nothing but the preparation is there."""
    outputs = [o for o in runs.find(finished_run) if o.stage == "prepare"]
    path = tmp_path_factory.mktemp("bare") / "report.html"
    pages.write(path, report.page(sections.Run(finished_run / "prepared", outputs)))
    return path


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.mark.parametrize("width", [375, 1200], ids=["phone", "desktop"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_stands_in_a_real_browser(html, window, width, dark, tmp_path):
    """No complaint, no request, every figure to be seen, nothing beyond the right edge, dark where dark is wanted."""
    window.open(html, width=width, dark=dark)
    assert window.complaints() == [] and window.requests() == []
    boxes = window.evaluate(BOXES)
    assert len([b for b in boxes if b[0]]) >= 13 and all(w > 0 and h > 0 for _, w, h in boxes)
    assert all(w >= 300 for label, w, _ in boxes if label)
    assert window.evaluate("document.documentElement.scrollWidth") <= width
    assert window.evaluate(OUTSIDE) == []
    assert window.evaluate(OVERLAPS) == 0
    colours = json.loads("[" + window.evaluate("getComputedStyle(document.body).backgroundColor")[4:-1] + "]")
    assert (max(colours) < 60) if dark else (min(colours) > 200)
    window.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_bare_run_stands_too(bare, window):
    """What is missing is told within the edges of a phone."""
    window.open(bare, width=375, dark=False)
    assert window.complaints() == [] and window.requests() == []
    assert window.evaluate("document.querySelectorAll('.missing').length") == 4
    assert window.evaluate("document.documentElement.scrollWidth") <= 375 and window.evaluate(OUTSIDE) == []
