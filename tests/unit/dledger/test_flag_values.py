"""Limits of numbers on the command line, in the help and in errors."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from dledger.command_line.flag_values import INT64_MAX, NewFile, Number, Seconds, Size, Whole


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (Whole(min=0), "-1", "-1 is not allowed: use 0 or more"),
        (Whole(min=1, max=256), "0", "0 is not allowed: use 1 to 256"),
        (Whole(min=1, max=256), "257", "257 is not allowed: use 1 to 256"),
        (Whole(max=5), "6", "6 is not allowed: use at most 5"),
        (Whole(min=0), str(INT64_MAX + 1), "9223372036854775808 is too large: numbers go to 9,223,372,036,854,775,807"),
        (Whole(), "1.5", "'1.5' is not a whole number"),
        (Whole(), "", "'' is not a whole number"),
        (Size(min=1024), "1k1", "1k1"),
        (Size(min=1024), "1", "1 is not allowed: use 1,024 or more"),
        (Number(min=0, min_open=True), "0", "0 is not allowed: use more than 0"),
        (Number(min=0, max=1, min_open=True), "2", "2 is not allowed: use more than 0, at most 1"),
        (Number(max=1, max_open=True), "1", "1 is not allowed: use less than 1"),
        (Number(min=0), "nan", "'nan' is not a finite number"),
        (Seconds(min=0, min_open=True), "0s", "0 is not allowed: use more than 0"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_with_them(kind: click.ParamType[float], text: str, words: str) -> None:
    """In words, not as a formula."""
    with pytest.raises(click.BadParameter) as caught:
        kind.convert(text, None, None)
    assert words in caught.value.format_message()


@pytest.mark.parametrize(
    ("kind", "text", "number"),
    [
        (Whole(min=0), "0", 0),
        (Whole(min=0), str(INT64_MAX), INT64_MAX),
        (Whole(min=1, max=256), "256", 256),
        (Size(min=1), "4k", 4096),
        (Number(min=0, max=1, min_open=True), "1", 1.0),
        (Seconds(min=0, min_open=True), "500ms", 0.5),
    ],
)
def test_limits_themselves_are_allowed(kind: click.ParamType[float], text: str, number: float) -> None:
    """Unless the help says more than, or less than."""
    assert kind.convert(text, None, None) == number


def test_the_help_has_the_same_words() -> None:
    """Click's own would be ``x>=1``."""

    @click.command()
    @click.option("--count", type=Whole(min=1))
    @click.option("--share", type=Number(min=0, max=1, min_open=True))
    def command(count: int, share: float) -> None:
        """None."""

    text = command.get_help(click.Context(command))
    assert "--count NUMBER  [1 or more]" in text
    assert "--share NUMBER  [more than 0, at most 1]" in text


def test_a_file_to_be_written_needs_its_directory(tmp_path: Path) -> None:
    """Checked at the start; whatever is no file, such as a pipe, is written to directly."""
    os.mkfifo(tmp_path / "pipe")
    kind = NewFile()

    assert kind.convert(str(tmp_path / "new.html"), None, None) == tmp_path / "new.html"
    assert kind.convert(str(tmp_path / "pipe"), None, None) == tmp_path / "pipe"
    with pytest.raises(click.BadParameter, match="there is no directory"):
        kind.convert(str(tmp_path / "gone" / "new.html"), None, None)
    with pytest.raises(click.BadParameter, match="is a directory"):
        kind.convert(str(tmp_path), None, None)


def test_a_file_to_be_written_needs_a_directory_that_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else hours of work would end without their report."""
    monkeypatch.setattr(os, "access", lambda path, _how: Path(path) != tmp_path)  # whoever runs the tests may be root

    with pytest.raises(click.BadParameter, match="no file can be written into"):
        NewFile().convert(str(tmp_path / "new.html"), None, None)
