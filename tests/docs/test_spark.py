"""What docs/spark.md and docs/spark-options.md say of columns and options is what the code knows."""

from __future__ import annotations

import re
from pathlib import Path

from dledger_spark.options import READ_OPTIONS, SECURITY_OPTIONS, WRITE_OPTIONS
from dledger_spark.schema import COLUMNS, KAFKA_COLUMNS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "spark.md").read_text(encoding="utf-8")
OPTIONS = (DOCS / "spark-options.md").read_text(encoding="utf-8")


def test_every_read_option_stands_there_with_its_default_meaning_and_limits() -> None:
    """The tables are the code's, row by row."""
    for option in (*READ_OPTIONS, *SECURITY_OPTIONS):
        assert option.row in OPTIONS
        assert all(f"`{alias}`" in OPTIONS for alias in option.aliases if "." in alias)


def test_every_write_option_stands_there_with_its_default_meaning_and_limits() -> None:
    """In a table of its own."""
    section = OPTIONS[OPTIONS.index("## Writing") : OPTIONS.index("## Tables")]

    assert all(one.row in section for one in WRITE_OPTIONS)


def test_every_column_stands_there_with_its_type() -> None:
    """Names, types, and which are virtual."""
    section = TEXT[TEXT.index("## Columns") : TEXT.index("## Read only")]
    rows = re.findall(r"^\| (`.*?`) \| ([a-z<>,]+) \| (.*?) ?\|$", section, re.MULTILINE)
    told = {
        name: (kind, says.startswith("virtual")) for names, kind, says in rows for name in re.findall(r"`(\w+)`", names)
    }

    assert told == {one.name: (one.ddl, one.virtual) for one in COLUMNS}
    assert all(f"`{one.name}`" in section for one in KAFKA_COLUMNS)
