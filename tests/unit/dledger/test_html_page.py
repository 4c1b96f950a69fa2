"""The frame of all reports: what a page may do, and the parts that reports share."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dledger.command_line import report_page


def test_a_page_may_do_only_what_it_was_written_with() -> None:
    """The policy names the hash of each style and script on the page, and allows nothing to be fetched."""
    text = report_page.document("t", ".own { }\n", ["<p>x</p>", ""], "let own = 1;\n")

    found = re.findall(r"<(script|style)>(.*?)</\1>", text, flags=re.DOTALL)
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for _, one in found]
    assert [kind for kind, _ in found] == ["style", "script", "script"]
    assert f"style-src {hashes[0]}; script-src {hashes[1]} {hashes[2]};" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "style=" not in text.replace("<style>", "")


def test_what_comes_from_a_log_is_text() -> None:
    """In every part."""
    evil = "<b>&\"'"
    parts = [
        report_page.paragraph(evil),
        report_page.facts([(evil, evil)]),
        report_page.banner(evil, items=[evil]),
        report_page.tile(evil, evil),
        report_page.table([(evil, False)], [report_page.row([report_page.cell(evil)])]),
        report_page.legend([(("",), evil)], 0, 0)[0],
        report_page.drawing(1, 10, (evil, evil), ""),
    ]

    assert all('<b>&"' not in one and "&lt;b&gt;&amp;" in one for one in parts)


def test_a_page_is_replaced_whole(tmp_path: Path) -> None:
    """Whoever reads the one before goes on reading it, and nothing else is left."""
    file = tmp_path / "report.html"
    report_page.write("before", file)

    with file.open() as reader:
        report_page.write("after", file)
        assert reader.read() == "before"

    assert file.read_text() == "after"
    assert list(tmp_path.iterdir()) == [file]


def test_a_page_is_not_written_through_a_link_that_somebody_prepared(tmp_path: Path) -> None:
    """In a directory where others write, such as /tmp, they could have it write over any file of the user's."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".report.html.tmp").symlink_to(victim)

    report_page.write("page", tmp_path / "report.html")

    assert victim.read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "page"


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Neither a half page nor what it was written to first."""
    (tmp_path / "report.html").write_text("before")

    with pytest.raises(UnicodeEncodeError):
        report_page.write("\ud800", tmp_path / "report.html")

    assert (tmp_path / "report.html").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_saved_picture_is_xml_whatever_a_log_contains() -> None:
    """Tags and keys may hold any character; XML has no control characters, and a log must not reorder a page's text."""
    evil = "".join(map(chr, (*range(32), 127, 0x85, 0x202E, 0x2066, 0xD800, 0xFFFE, 0xFFFF)))
    page = report_page.document("t", "", [report_page.drawing(1, 10, (evil, evil), f"<text>{evil}</text>")])

    drawn = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    text = "".join(ElementTree.fromstring(drawn).itertext())
    assert "\u241b" in text
    assert not set(evil) & set(text) - {"\t", "\n"}


def test_a_picture_can_be_saved_only_where_the_script_runs() -> None:
    """Its buttons are hidden until then."""
    picture = report_page.picture(report_page.drawing(1, 10, ("a", "b"), ""), '<div class="tip"></div>')

    root = ElementTree.fromstring(picture)
    line = root.find("p")
    assert line is not None
    assert (line.get("class"), line.get("hidden")) == ("save", "hidden")
    assert [one.get("data-as") for one in line.iter("button")] == ["svg", "png"]


def test_a_legend_takes_as_many_lines_as_it_needs() -> None:
    """No entry begins where it has no room; without entries, there is no legend."""
    names = [f"series number {number}" for number in range(20)]
    drawn, height = report_page.legend([(('class="a"', 'fill="b"'), name) for name in names], 14, 100)

    root = ElementTree.fromstring(f"<svg>{drawn}</svg>")
    texts = [(float(one.get("x", "0")), float(one.get("y", "0")), one.text) for one in root.iter("text")]
    assert [text for _, _, text in texts] == names
    assert len(root.findall("rect")) == 40
    assert all(x + report_page.text_px(str(text)) <= report_page.CHART_WIDTH for x, _, text in texts)
    assert height == report_page.LEGEND_LINE * len({y for _, y, _ in texts}) > report_page.LEGEND_LINE
    assert report_page.legend([], 14, 100) == ("", 0.0)
