"""Reports as people, scripts and browsers get them."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.command_line.report_page import (
    CHART_WIDTH,
    Bars,
    Chart,
    ColumnChart,
    CountUnit,
    Series,
    Value,
    shown,
    svg,
    text_px,
)
from dledger_spark.jobs.report import (
    Fact,
    JobReport,
    ReportColumn,
    Table,
    key,
    page,
    print_json,
    print_report,
    write_page,
)
from tests.unit.dledger_spark.jobs.reports import REPORT

SVG = "{http://www.w3.org/2000/svg}"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _printed(report: JobReport, out: io.StringIO) -> str:
    print_report(report, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, CountUnit.COUNT, "-"),
        (True, CountUnit.TEXT, "yes"),
        ("x", CountUnit.BYTES, "x"),
        (1_234_567, CountUnit.COUNT, "1,234,567"),
        (1023, CountUnit.BYTES, "1023 B"),
        (1024, CountUnit.BYTES, "1.00 KiB"),
        (1536, CountUnit.BYTES, "1.50 KiB"),
        (300 << 30, CountUnit.BYTES, "300 GiB"),
        (0.25, CountUnit.SECONDS, "250 ms"),
        (90, CountUnit.SECONDS, "90.0 s"),
        (3600 * 30, CountUnit.SECONDS, "30.0 h"),
        (86400 * 3, CountUnit.SECONDS, "3.0 d"),
        (0.125, CountUnit.SHARE, "12.5%"),
        (1_700_000_000_000, CountUnit.TIME_MS, "2023-11-14 22:13:20"),
    ],
)
def test_figures_are_shown_with_their_unit(value: Value, unit: CountUnit, text: str) -> None:
    """Three figures, powers of 1024 for bytes, UTC for times."""
    assert shown(value, unit) == text


def test_a_report_is_plain_lines_where_nobody_looks() -> None:
    """Summary and tables are padded columns; a table that is cut says how much is missing."""
    text = _printed(REPORT, io.StringIO())

    assert text.startswith("Sample of /logs/<b>\n\n  log        /logs/<b>\n  entries    1,234,567\n")
    assert "  orders" in text
    assert "… and 47 more: --json has all of them" in text
    assert text.endswith("note: the log begins at index 17\n")


@pytest.mark.parametrize("out", [io.StringIO(), _Terminal()], ids=["pipe", "terminal"])
def test_names_from_the_log_cannot_move_the_cursor(out: io.StringIO) -> None:
    """A topic or a key is other people's text."""
    assert "evil\\x1b[2J" in _printed(REPORT, out)


def test_json_has_plain_numbers_and_all_rows() -> None:
    """One document on one line, names in snake_case."""
    out = io.StringIO()
    print_json(REPORT, out)

    document = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert document["ok"] is True
    assert document["summary"]["log_bytes"] == 3 << 30
    assert document["tables"]["by_topic"][0] == {"topic": "orders", "messages": 1_000_000, "share": 0.81}
    assert len(document["tables"]["long"]) == 50
    assert key("Longest gap (s)") == "longest_gap_s"


def test_problems_make_exit_code_1_and_are_said_last() -> None:
    """What is wrong cannot be overlooked, by people or by scripts."""
    damaged = replace(REPORT, problems=("block 3 differs",))

    assert (REPORT.exit_code, damaged.exit_code) == (0, 1)
    assert _printed(damaged, io.StringIO()).endswith("PROBLEM: block 3 differs\n")
    assert damaged.to_json()["ok"] is False
    assert "block 3 differs" in page(damaged)


def test_a_row_of_another_width_is_refused() -> None:
    """A mistake of a job shows where it is made."""
    with pytest.raises(ValueError, match="2 columns"):
        Table("t", (ReportColumn("a"), ReportColumn("b")), ((1, 2), (3,)))


def test_a_page_is_one_file_with_nothing_from_elsewhere(tmp_path: Path) -> None:
    """No network, names escaped, both themes; written whole."""
    file = tmp_path / "report.html"
    write_page(REPORT, file)

    text = file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "/logs/&lt;b&gt;" in text
    assert "<b>/logs/<b>" not in text
    assert "prefers-color-scheme: dark" in text
    for foreign in ("src=", "href=", "http://", "https://", "@import", "url(h"):
        assert foreign not in text


@pytest.mark.parametrize("chart", REPORT.charts, ids=["columns", "bars"])
def test_a_chart_has_a_mark_per_value_each_with_its_figure(chart: Chart) -> None:
    """Well-formed SVG; heights and widths are to scale; every mark has a title."""
    root = ET.fromstring(svg(chart, 7).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    marks = root.findall(f"{SVG}g")
    titles = [mark.findtext(f"{SVG}title") for mark in marks]
    side = "height" if isinstance(chart, ColumnChart) else "width"
    sizes = [float(mark.find(f"{SVG}rect").get(side, "0")) for mark in marks]  # type: ignore[union-attr]  # it is there
    values = [value for row in zip(*(one.values for one in chart.series), strict=True) for value in row if value]

    assert all(titles)
    assert len(marks) == len(values)
    assert sizes == pytest.approx([value * sizes[0] / values[0] for value in values], abs=0.1 * max(values) / values[0])


def test_labels_are_whole_however_long_they_are() -> None:
    """A topic may have 127 characters, and a key more, of any kind: long ones stand above their bars, in lines."""
    topic, key_text = "t" * 127, "<k>&" * 75
    for labels in (("a", "b"), ("a", topic), (topic, key_text)):
        chart = Bars("t", CountUnit.COUNT, labels, (Series("x", (1.0,) * 2),))
        root = ET.fromstring(svg(chart, 1))
        texts = [one.text or "" for one in root.iter("text") if one.get("class") == "label"]
        assert "".join(texts) == "".join(labels)
        assert all(text_px(one) < CHART_WIDTH for one in texts)
        ends = [float(one.get("x", "0")) for one in root.iter("text") if one.get("text-anchor") == "end"]
        assert len(ends) == (2 if max(map(len, labels)) < 10 else 0)


def test_few_columns_are_columns_and_no_wall() -> None:
    """A log of one hour is a column of a column's width; the last label does not stick out."""
    for count in (1, 2, 180):
        labels = tuple(f"11-24 {n % 24:02d}:00" for n in range(count))
        root = ET.fromstring(svg(ColumnChart("t", CountUnit.COUNT, labels, (Series("x", (5.0,) * count),)), 1))
        assert max(float(one.get("width", "0")) for one in root.iter("rect")) <= 64
        middles = [float(one.get("x", "0")) for one in root.iter("text") if one.get("text-anchor") == "middle"]
        assert max(middles) + text_px(labels[0]) / 2 <= CHART_WIDTH


@pytest.mark.parametrize(
    ("most", "unit", "ticks"),
    [
        (198.0, CountUnit.PER_SECOND, ["0/s", "50/s", "100/s", "150/s", "200/s"]),
        (0.37, CountUnit.PER_SECOND, ["0/s", "0.1/s", "0.2/s", "0.3/s", "0.4/s"]),
        (98.4 * 1024, CountUnit.BYTES_PER_SECOND, ["0 B/s", "25 KiB/s", "50 KiB/s", "75 KiB/s", "100 KiB/s"]),
        (3.1 * 1024**3, CountUnit.BYTES, ["0 B", "819 MiB", "1.6 GiB", "2.4 GiB", "3.2 GiB"]),
        (1_000_000.0, CountUnit.COUNT, ["0", "250,000", "500,000", "750,000", "1,000,000"]),
    ],
)
def test_an_axis_has_round_figures_without_digits_that_say_nothing(
    most: float, unit: CountUnit, ticks: list[str]
) -> None:
    """Of bytes, round in the unit that they are shown in."""
    root = ET.fromstring(svg(ColumnChart("t", unit, ("a",), (Series("x", (most,)),)), 1))

    assert [one.text for one in root.iter("text") if one.get("text-anchor") == "end"] == ticks


def test_texts_and_times_stand_in_lines_and_figures_in_tiles() -> None:
    """A path or a time does not fit into a tile; what the title says is not said again."""
    text = page(replace(REPORT, summary=(*REPORT.summary, Fact("into", "/data/" + "x" * 200))))

    assert f"<dt>into</dt><dd>/data/{'x' * 200}</dd>" in text
    assert "<dt>from</dt><dd>2023-11-14 22:13:20</dd>" in text
    assert "<b>1,234,567</b><span>entries</span>" in text
    assert "<dt>log</dt>" not in text


def test_an_empty_chart_is_a_chart() -> None:
    """A log without messages has a page, too."""
    for kind in (ColumnChart, Bars):
        ET.fromstring(svg(kind("none", CountUnit.COUNT, (), (Series("x", ()),)), 1))


def test_charts_refuse_what_they_cannot_show() -> None:
    """A value per label, and no more colours than the page has."""
    with pytest.raises(ValueError, match="2 values of x for 1 labels"):
        ColumnChart("t", CountUnit.COUNT, ("a",), (Series("x", (1.0, 2.0)),))
    with pytest.raises(ValueError, match="1 to 4 series"):
        Bars("t", CountUnit.COUNT, ("a",), tuple(Series(str(n), (1.0,)) for n in range(5)))
