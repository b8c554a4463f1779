"""The page of a timeline in a real browser: wide and narrow, light and dark, by pointer and keys, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.browser import PROGRAM, Browser
from tests.support.timelines import busy_timeline

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")

SAID = "document.querySelector('output').textContent"
CHOSEN = "(document.querySelector('.chosen title') || {}).textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busy_timeline().save(tmp_path_factory.mktemp("profile"))[0]


def colour(browser: Browser, name: str, of: str = "body") -> list[float]:
    text = browser.value(f"getComputedStyle(document.querySelector('{of}')).{name}")
    return [float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]]


def contrast(one: list[float], other: list[float]) -> float:
    """The ratio of luminances, as WCAG defines it."""

    def luminance(parts: list[float]) -> float:
        parts = [part / 255 for part in parts]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_nothing_overflows_and_everything_can_be_read(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("window.innerWidth") == width
    ink, paper = colour(browser, "color"), colour(browser, "backgroundColor")
    assert contrast(ink, paper) > 7
    assert contrast(colour(browser, "color", ".ticks span"), paper) > 4.5
    assert (sum(paper) < 150) is dark
    assert browser.requests == [page.as_uri()]
    assert browser.errors == []
    plot = browser.value("document.querySelector('.scroll').clientWidth")
    assert plot > width * 0.55  # most of the screen is the picture
    ticks = browser.value(
        "[...document.querySelectorAll('.ticks span')].map(t => t.getBoundingClientRect()).filter(b => b.width)"
        ".map(b => [b.left, b.right])"
    )
    assert all(left[1] < right[0] for left, right in pairwise(ticks))  # none covers the next


def test_the_pointer_and_a_touch_say_what_a_span_is(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.value(SAID).startswith("Point at a span")
    browser.point("document.querySelectorAll('svg g')[0].children[3]")
    assert browser.value(SAID) == "forward blocks.3: 4 ms, from 18 ms on"
    browser.point("document.querySelectorAll('svg g')[2].children[1]", click=True)
    assert browser.value(SAID).startswith("all-gather blocks.2: ")
    assert "24.0 MiB" in browser.value(SAID)
    browser.point("document.querySelector('h1')")
    assert browser.value(SAID) == browser.value(CHOSEN)  # what was clicked stays


def test_keys_choose_spans_and_zoom(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "scroll"
    browser.press("ArrowRight")
    assert browser.value(SAID).startswith("forward blocks.0: ")
    browser.press("ArrowRight")
    assert browser.value(SAID).startswith("forward blocks.1: ")
    browser.press("ArrowDown")
    assert browser.value(SAID).startswith("all-gather of blocks.")
    browser.press("ArrowUp")
    browser.press("ArrowLeft")
    assert browser.value(SAID).startswith("forward blocks.")
    wide = browser.value("document.querySelector('.plot').clientWidth")
    browser.press("+")
    assert browser.value("document.querySelector('.plot').clientWidth") == 2 * wide
    for _ in range(30):
        browser.press("ArrowRight")
    left, right = browser.value("(b => [b.left, b.right])(document.querySelector('.chosen').getBoundingClientRect())")
    view = browser.value("(b => [b.left, b.right])(document.querySelector('.scroll').getBoundingClientRect())")
    assert view[0] <= left
    assert right <= view[1]  # the chosen span is brought into view
    browser.press("-")
    assert browser.value("document.querySelector('.plot').clientWidth") == wide
    browser.press("Escape")
    assert browser.value(CHOSEN) is None
    assert browser.errors == []


def test_a_picture_of_the_page_has_the_colours_of_its_rows(browser: Browser, page: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    browser.open(page, width=390, dark=True)
    pixels = (imread(browser.picture(tmp_path / "page.png"))[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == 390
    found = {tuple(one) for one in pixels.reshape(-1, 3)}
    assert (0x4C, 0x72, 0xB0) in found  # forward, which is painted in full
