"""Command lines in the documents are understood by the command line as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from dledger_cli.cli import main
from tests.docs.documents import ROOT, Line, documents, lines

_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_VALUE_OF = {"HOST:PORT,…": "127.0.0.1:1", "FILE": __file__, "DIR": str(ROOT)}


def _command_lines() -> Iterator[tuple[Line, list[str]]]:
    """The words after ``dledger``, of every line of a block and every piece of prose that begins with it."""
    for path in documents():
        pending = ""
        for line in lines(path):
            if line.fence is not None:
                text = pending + line.text
                if text.endswith("\\"):
                    pending = text[:-1]
                    continue
                pending = ""
                for piece in re.split(r"\s[|]\s", text):
                    if words := _words(re.sub(r"^\s*\$ ", "", piece)):
                        yield line, words
            else:
                for quoted in re.findall(r"`([^`]+)`", line.text):
                    if words := _words(quoted):
                        yield line, words


def _words(text: str) -> list[str]:
    text = re.split(r"\s{3,}| #| &$| > ", text.strip())[0]  # what follows is said about it
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    if not words or words[0].rpartition("/")[2] != "dledger" or len(words) < 2:
        return []
    if not re.fullmatch(r"[a-z-]+", words[1]) or "[OPTIONS]" in words:
        return []  # a placeholder, or how to use it
    return words[1:]


def _parse(words: list[str]) -> None:
    """Let click understand a line, without running it."""
    command: click.Command = main
    context = click.Context(main, info_name="dledger")
    while isinstance(command, click.Group):
        if words and words[0] not in ("-h", "--help") and words[0] not in command.commands and command is not main:
            words = _as_the_group_would(command, words)
        if not words or words[0].startswith("-"):
            return
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        command, context = found, click.Context(found, info_name=name, parent=context)
    if words[-1:] == ["--help"]:
        return
    command.make_parser(context).parse_args([_VALUE_OF.get(word, word) for word in words])


def _as_the_group_would(group: click.Group, words: list[str]) -> list[str]:
    """``dledger broker -c FILE`` means ``dledger broker start -c FILE``."""
    return ["start", *words] if group.name == "broker" and words[0].startswith("-") else words


def test_every_quoted_command_line_parses() -> None:
    """Nobody types a line of the documents and reads "no such option"."""
    wrong = []
    found = list(_command_lines())
    for line, words in found:
        try:
            _parse(list(words))
        except click.ClickException as error:
            wrong.append(f"{line.place}: dledger {' '.join(words)}: {error.format_message()}")

    assert len(found) > 100
    assert wrong == []


def test_the_parser_of_this_test_refuses_what_the_command_line_refuses() -> None:
    """The test above would notice."""
    for words in (
        ["serve", "--no-such"],
        ["nonsense"],
        ["topic", "nonsense"],
        ["broker", "-c"],
        ["topic", "status", "-t", "x"],
    ):
        with pytest.raises(click.ClickException):
            _parse(words)
    _parse(["broker", "-c", "x.conf"])


def test_every_make_target_that_is_spoken_of_exists() -> None:
    """``make help`` knows it."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spoken = {
        (line.place, name)
        for path in documents()
        for line in lines(path)
        for name in re.findall(r"`make ([\w-]+)" if line.fence is None else r"^\s*(?:\$ )?make ([\w-]+)", line.text)
    }

    assert spoken
    assert [one for one in sorted(spoken) if one[1] not in targets] == []
