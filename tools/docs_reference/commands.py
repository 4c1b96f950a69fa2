"""``docs/cli.md``: every command, from click's command tree."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import click

from cluster.cli import main

_HEAD: Final = """# Commands

<!-- generated from the commands by `make docs`; do not edit -->

Built-in help: `dledger --help`, `dledger COMMAND --help`. Exit codes: **0** done, **1** failed (or
there is no leader, no master, damage found), **2** wrong usage or settings, **3** the outcome of a write is unknown. A
server ends with 0 after SIGTERM or SIGINT, with **70** after a fatal error, and with 128 + the signal's number when a
second signal interrupts its graceful stop. What to do in each case: [operating.md](operating.md#exit-codes).

"""
_TABLE: Final = "| option | default | |\n|---|---|---|\n"
_FAMILIES: Final = (
    ("DLEDGER_BOOTSTRAP", "Options of commands that talk to a log", "One address is enough to discover the others."),
    ("DLEDGER_BROKER", "Options of commands that talk to brokers", "One address is enough to discover the others."),
)
"""Commands that read one of these variables share options, which are shown once."""


def text() -> str:
    """The whole document."""
    found = list(_walk(main, click.Context(main, info_name="dledger")))
    index = "".join(
        f"| [`{context.command_path}`](#{_anchor(context.command_path)}) | {_cell(command.get_short_help_str(200))} |\n"
        for command, context in found[1:]
    )
    commands = [command for command, _ in found[1:]]
    families = [_Family(title, words, _shared(commands, variable)) for variable, title, words in _FAMILIES]
    sections = [_section(command, context, families) for command, context in found[1:]]
    return "".join((_HEAD, "| command | |\n|---|---|\n", index, *map(_family_section, families), *sections))


@dataclass(frozen=True, slots=True)
class _Family:
    """Options shared by many commands."""

    title: str
    words: str
    rows: tuple[str, ...]


def _shared(commands: list[click.Command], variable: str) -> tuple[str, ...]:
    """The rows of the options that all commands reading ``variable`` have."""
    rows = [
        [_row(one) for one in command.params]
        for command in commands
        if any(one.envvar == variable for one in command.params)
    ]
    return tuple(row for row in rows[0] if row and all(row in others for others in rows)) if rows else ()


def _family_section(family: _Family) -> str:
    return f"\n## {family.title}\n\n{family.words}\n\n{_TABLE}{''.join(family.rows)}"


def walk() -> Iterator[tuple[click.Command, click.Context]]:
    """Every visible command, groups before their subcommands."""
    yield from _walk(main, click.Context(main, info_name="dledger"))


def _walk(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            one = command.get_command(context, name)
            if one is not None and not one.hidden:
                yield from _walk(one, click.Context(one, info_name=name, parent=context))


def _section(command: click.Command, context: click.Context, families: list[_Family]) -> str:
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"\n## {context.command_path}\n\n", f"```\n{' '.join(usage.split())}\n```\n\n", _help(command), "\n"]
    rows = [row for one in command.params if (row := _row(one))]
    family = next((one for one in families if one.rows and set(one.rows) <= set(rows)), None)
    if family is not None:
        rows = [one for one in rows if one not in family.rows]
    if rows:
        parts += ["\n" + _TABLE, *rows]
    if family is not None:
        parts.append(f"\n{'And the' if rows else 'The'} [{family.title.lower()}](#{_anchor(family.title)}).\n")
    if command.epilog:
        parts.append("\n" + _epilog(command.epilog))
    return "".join(parts)


def _help(command: click.Command) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


def _row(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option) or parameter.hidden:
        return ""
    names = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
    if not parameter.is_flag:
        names += f" {parameter.make_metavar(click.Context(main))}"
    shown = parameter.default if parameter.show_default else None
    default = f"`{shown}`" if shown not in (None, (), False) else ""
    words = parameter.help or ""
    if parameter.multiple and "repeated" not in words:
        words += " May be repeated."
    if parameter.envvar and str(parameter.envvar) not in words:
        words += f" Also `{parameter.envvar}`."
    return f"| {_cell(names)} | {_cell(default)} | {_cell(words)} |\n"


def _epilog(epilog: str) -> str:
    """Keeps the lines of paragraphs that start with ``\\b``, as click does; the others are prose."""
    parts: list[str] = []
    for one in re.split(r"\n\s*\n", inspect.cleandoc(epilog)):
        verbatim, _, rest = one.partition("\n")
        if verbatim.strip() == "\b":
            title, _, lines = rest.partition("\n")
            if title == "Examples:":
                parts.append(f"```\n{inspect.cleandoc(lines)}\n```\n")
                continue
            one = rest
        parts.append(" ".join(one.split()) + "\n")
    return "\n".join(parts)


def _cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
