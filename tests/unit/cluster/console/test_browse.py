"""Bodies leave the console as text that hides nothing, or as a hex dump, and never whole when they are large."""

from __future__ import annotations

import pytest

from cluster.console import browse


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, tab\tand\nline", "plain, tab\tand\nline"),
        ("naïve ☕ 中文", "naïve ☕ 中文"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("line\u2028separator", "line\\u2028separator"),
        ("nul\x00", "nul\\x00"),
    ],
)
def test_characters_that_hide_or_reorder_are_escaped(text: str, shown: str) -> None:
    """Whatever a producer sent, what is seen is what is there."""
    assert browse.safe_text(text) == shown


def test_markup_stays_text() -> None:
    """The page sets textContent only; the server changes nothing of it."""
    attack = b"<img src=x onerror=alert(1)><script>alert(2)</script>"

    assert browse.body_view(attack)["text"] == attack.decode()


def test_bytes_that_are_no_text_are_shown_in_hex() -> None:
    """Offset, bytes, and the readable ones of them."""
    view = browse.body_view(bytes(range(256)))

    assert view["text"] is None
    assert str(view["hex"]).splitlines()[4] == f"00000040  {bytes(range(64, 80)).hex(' ')}  @ABCDEFGHIJKLMNO"
    assert browse.preview(b"\xff\xfe\x00")["text"] == "ff fe 00"


def test_a_large_body_is_cut_between_characters() -> None:
    """64 KiB of text, 4 KiB of hex, and how much there is."""
    body = "é".encode() * 100_000

    view = browse.body_view(b"x" + body)

    assert view["bytes"] == 200_001
    assert str(view["text"]).startswith("xéé")
    assert len(str(view["text"])) <= browse.TEXT_BYTES_MAX
    assert len(str(view["hex"]).splitlines()) == browse.HEX_BYTES_MAX // 16


def test_a_preview_is_one_short_line() -> None:
    """Lines and blanks become one blank."""
    shown = browse.preview(("{\n  " + "a" * 500).encode())

    assert str(shown["text"]).startswith("{ aaa")
    assert len(str(shown["text"])) == browse.PREVIEW_CHARACTERS


def test_an_empty_body_is_empty_text() -> None:
    """Neither hex nor an error."""
    assert browse.body_view(b"") == {"bytes": 0, "text": "", "text_bytes": 0, "hex": "", "hex_bytes": 0}
