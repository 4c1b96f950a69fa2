"""Java properties syntax, as ``java.util.Properties.load`` documents it."""

from __future__ import annotations

import pytest

from dledger import properties
from dledger.errors import ConfigError
from dledger.properties import Property


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a=b", "a", "b"),
        ("  a = b c ", "a", "b c"),
        ("a:b", "a", "b"),
        ("a : b", "a", "b"),
        ("a b", "a", "b"),
        ("a\tb=c", "a", "b=c"),
        ("a==b", "a", "=b"),
        ("a", "a", ""),
        ("a=", "a", ""),
        (r"a\=b\:c\ d=e", "a=b:c d", "e"),
        (r"a=\t\n\r\f\\\q", "a", "\t\n\r\f\\q"),
        (r"a=\u00e9\ud83d\ude00", "a", "é😀"),
        ("a=b # no comment", "a", "b # no comment"),
        ("a=one\\\n   two", "a", "onetwo"),
        ("a=one\\\n# no comment", "a", "one# no comment"),
        ("a=one\\\\", "a", "one\\"),
        ("a=one\\", "a", "one"),
    ],
)
def test_one_property_is_read_as_java_reads_it(text: str, key: str, value: str) -> None:
    """Separators, escapes and continuation follow the Java documentation."""
    assert properties.parse(text) == [Property(key, value, 1)]


def test_comments_and_blank_lines_are_skipped_and_lines_are_counted() -> None:
    """``#`` and ``!`` open a comment, every line end counts, a property stands where it starts."""
    text = "# one\r\n! two\n\n   \ra=1\\\n2\n  # three\nb=2\n"

    assert properties.parse(text) == [Property("a", "12", 5), Property("b", "2", 8)]


def test_an_xml_comment_is_skipped_and_must_end() -> None:
    """RocketMQ 5's name server files begin with one, whose lines Java takes for properties."""
    text = "<!-- one\n a=1\n-->\nb=<!-- 2\n<!-- three -->\nc=3\n"
    assert properties.parse(text) == [Property("b", "<!-- 2", 4), Property("c", "3", 6)]

    with pytest.raises(ConfigError, match=r"line 2: the comment <!-- is never closed"):
        properties.parse("a=1\n<!--\nb=2\n")


def test_every_broken_unicode_escape_is_named_with_its_line() -> None:
    """A ``\\u`` without four digits is an error in Java too."""
    with pytest.raises(ConfigError) as caught:
        properties.parse("a=\\u12\nb=1\nc=\\uzzzz")

    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["line 1", "line 3"]


@pytest.mark.parametrize("raw", ["a=é".encode(), b"\xef\xbb\xbfa=\xc3\xa9", "a=é".encode("latin-1")])
def test_utf_8_and_latin_1_are_told_apart(raw: bytes) -> None:
    """Old files are latin-1 (Java's rule), new ones UTF-8, and editors may add a byte order mark."""
    assert properties.parse(properties.decode(raw)) == [Property("a", "é", 1)]
