"""Reports in a real browser, opened as files: no complaint about them, nothing sticks out, pictures can be saved."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cluster.drill import html
from dledger.command_line.report_page import Bars, CountUnit, Series
from dledger_spark.jobs.report import page as job_page
from tests.browser.chromium import Page
from tests.unit.cluster.drill.histories import failover, perfect, result_of
from tests.unit.dledger_spark.jobs.reports import REPORT

SVG = "{http://www.w3.org/2000/svg}"
STICKING_OUT = """
const wide = document.documentElement.clientWidth;
const all = [...document.querySelectorAll("main *")].filter((one) => !one.closest(".scroll"));
return all.filter((one) => one.getBoundingClientRect().right > wide + 1).map((one) => one.outerHTML.slice(0, 80));
"""
OUTSIDE_THEIR_PICTURE = """
return [...document.querySelectorAll("svg.chart text")].filter((one) => {
  const box = one.getBBox(), all = one.ownerSVGElement.viewBox.baseVal;
  return box.x < -1 || box.x + box.width > all.width + 1 || box.y + box.height > all.height + 1;
}).map((one) => one.textContent);
"""

ON_EACH_OTHER = """
const found = [];
for (const picture of document.querySelectorAll("svg.chart")) {
  const texts = [...picture.querySelectorAll("text")].map((one) => [one.textContent, one.getBBox()]);
  texts.forEach(([name, box], at) => texts.slice(0, at).forEach(([other, its]) => {
    const apart = box.x >= its.x + its.width - 1 || its.x >= box.x + box.width - 1;
    if (!apart && box.y < its.y + its.height - 4 && its.y < box.y + box.height - 4) found.push(`${name} | ${other}`);
  }));
}
return found;
"""


_WIDE_LABELS = tuple(
    Bars("Wide", CountUnit.BYTES, (label, "x"), (Series("bytes", (1.0, 2.0**40 * 999)),))
    for label in (
        "%RETRY%group / 0",
        "%DLQ%MWMWMWMW",
        "@" * 18,
        "W" * 127,
        "m" * 400,
        "\N{CJK UNIFIED IDEOGRAPH-65E5}" * 90,
    )
)


def reports(directory: Path) -> list[Path]:
    """A job's report, and that of two drills."""
    pages = {
        "job": job_page(replace(REPORT, charts=(*REPORT.charts, *_WIDE_LABELS))),
        "drills": html.page([result_of(failover(), perfect().verdict()), result_of(failover(), None, "it broke")]),
    }
    for name, text in pages.items():
        (directory / f"{name}.html").write_text(text, encoding="utf-8")
    return [directory / f"{name}.html" for name in pages]


def is_complete(download: Path) -> bool:
    """The browser writes to another name, and renames the file when it is whole."""
    unfinished = list(download.parent.glob("*.crdownload"))
    return not unfinished and download.is_file() and download.stat().st_size > 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_sticks_out_of_a_report_at_any_width(page: Page, tmp_path: Path, theme: str) -> None:
    """What is too wide scrolls in its own place; no word of a picture is cut off."""
    for file in reports(tmp_path):
        for width in (360, 1280):
            page.resize(width, 900)
            page.prefer(theme)
            page.driver.get(file.as_uri())

            assert page.js(STICKING_OUT) == []
            assert page.js(OUTSIDE_THEIR_PICTURE) == []


def test_no_two_words_of_a_drills_picture_lie_on_each_other(page: Page, tmp_path: Path) -> None:
    """Also if the fault came at the very beginning of a long drill, and a peak is cut off beside it."""
    usual = result_of(failover(), perfect().verdict())
    file = tmp_path / "drills.html"
    for seconds in (usual.seconds, 10 * usual.seconds):
        file.write_text(html.page([replace(usual, seconds=seconds, rate=1)]), encoding="utf-8")
        page.resize(1280, 900)
        page.driver.get(file.as_uri())

        assert page.js(ON_EACH_OTHER) == []


def test_a_picture_is_saved_as_one_file_that_looks_the_same(page: Page, tmp_path: Path) -> None:
    """As SVG with its colours in it, and as PNG in twice the size; the theme's colours are those on the page."""
    saved = tmp_path / "saved"
    saved.mkdir()
    page.resize(1280, 900)
    page.prefer("dark")
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(saved)})
    for file in reports(tmp_path):
        page.driver.get(file.as_uri())
        name = re.sub("[^a-z0-9]+", "-", str(page.js("return document.querySelector('svg title').textContent")).lower())

        for ending in ("svg", "png"):
            page.click(f".picture [data-as={ending}]")
            file_saved = saved / f"{name}.{ending}"
            page.wait(lambda one=file_saved: is_complete(one), f"{name}.{ending} is saved", 60.0)  # type: ignore[misc]  # evaluated at once

        root = ElementTree.parse(saved / f"{name}.svg").getroot()
        shapes = [one for one in root.iter() if one.tag in (f"{SVG}rect", f"{SVG}path", f"{SVG}text")]
        assert len(shapes) > 20
        assert all("fill: " in one.get("style", "") for one in shapes)
        assert [one for one in root.iter() if "cursor" in one.get("class", "").split()] == []  # follows the mouse
        assert "var(" not in (saved / f"{name}.svg").read_text(encoding="utf-8")
        assert "background: rgb(26, 33, 43)" in root.get("style", "").replace("background-color", "background")
        assert (saved / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert int.from_bytes((saved / f"{name}.png").read_bytes()[16:20], "big") == 2000
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "default"})
