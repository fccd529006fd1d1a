"""The page of ``timelyfreeze plan --html`` in a real browser, where there is one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.cli.plan import main

PROFILE = Path(__file__).resolve().parents[3] / "profiles/tiny_8m_1F1B/bounds.json"

pytestmark = pytest.mark.slow


@pytest.fixture
def page() -> Any:
    name = "playwright.sync_api"
    playwright = pytest.importorskip(name, reason="pip install playwright runs this test")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("apt-get install chromium runs this test")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1200, "height": 900})
        browser.close()


def test_it_shows_both_batches_on_one_axis_and_asks_for_nothing(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main([str(PROFILE), "--schedules", "1F1B", "--r-max", "0.8", "--html", str(file)]) == 0
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(file.as_uri())
    assert (asked, complaints) == ([file.as_uri()], [])
    drawings = page.locator("svg")
    assert drawings.count() == 2
    first, second = (drawings.nth(n).bounding_box() for n in range(2))
    assert (first["x"], first["width"]) == (second["x"], second["width"])
    for n, frame in enumerate((first, second)):
        boxes = [box.bounding_box() for box in drawings.nth(n).locator("rect").all()]
        assert len(boxes) == 4 * 2 * 8
        assert all(box["width"] > 0 for box in boxes)
        assert min(box["x"] for box in boxes) >= frame["x"]
        assert max(box["x"] + box["width"] for box in boxes) <= frame["x"] + frame["width"] + 1
        # Actions of a rank lie side by side.
        for lane in {round(box["y"]) for box in boxes}:
            row = sorted((b for b in boxes if round(b["y"]) == lane), key=lambda b: b["x"])
            ends = [box["x"] + box["width"] for box in row]
            assert all(end <= box["x"] + 1 for end, box in zip(ends, row[1:], strict=False))
    shape = drawings.first.locator("rect").first
    before = shape.evaluate("one => getComputedStyle(one).strokeWidth")
    shape.hover()
    assert shape.evaluate("one => getComputedStyle(one).strokeWidth") != before
    assert page.evaluate("document.body.scrollWidth") <= 1200
