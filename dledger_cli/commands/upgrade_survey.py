"""Prints what ``dledger upgrade check --from`` has found in a directory."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger.errors import ConfigError
from dledger_cli import terminal

if TYPE_CHECKING:  # imported only when the command runs
    from rocketstore.upgrade.survey import Survey, TopicSurvey

_TOPICS_SHOWN = 100
_NAME_SHOWN = 40


def run_survey(directory: Path, conf_files: tuple[Path, ...], *, as_json: bool) -> int:
    """Survey the directory and print the result; returns the exit code."""
    if len(conf_files) > 1:
        raise click.UsageError("--from looks at one directory: give one conf file at most")
    if not directory.is_dir():
        raise ConfigError([f"{directory} is not a directory"])
    from rocketstore.upgrade.members import in_use
    from rocketstore.upgrade.survey import survey

    with terminal.progress(f"reading {directory}", None):
        found = survey(directory, conf_files[0] if conf_files else None)
    if in_use(directory):
        found.todo.insert(0, f"a broker is using {directory}: stop it, and look again")
    if as_json:
        terminal.print_json(_document(found))
    else:
        _print(found)
    return 1 if found.damaged or found.refused else 0


def _print(found: Survey) -> None:
    from rocketstore.upgrade.survey import by_size

    kind = "member of a group" if found.is_member else "plain broker"
    click.echo(f"{found.root}: {kind}, offsets {found.begin:,} to {found.end:,}")
    topics = list(by_size(found))
    if topics:
        rows = [_row(one) for one in topics[:_TOPICS_SHOWN]]
        columns = ("topic", "messages", "queues", "bytes", "first", "last")
        terminal.print_table(columns, rows, least=("bytes", "first", "queues"))
    if len(topics) > _TOPICS_SHOWN:
        click.echo(f"and {len(topics) - _TOPICS_SHOWN:,} more topics: --json names them all")
    for level, count in sorted(found.delayed.items()):
        click.echo(f"delay level {level}: {count:,} messages wait")
    for title, sentences in (
        ("comes along", found.comes),
        ("DOES NOT come along", found.stays),
        ("conf file", found.settings),
        ("conf file, REFUSED", found.refused),
        ("DAMAGED", [f"{one.path}: offset {one.offset}: {one.reason}" for one in found.damaged]),
        ("to do", found.todo),
    ):
        for sentence in sentences:
            click.echo(f"{title}: {sentence}")


def _row(one: TopicSurvey) -> list[str]:
    times = (_time(one.first_ms), _time(one.last_ms))
    name = one.name if len(one.name) <= _NAME_SHOWN else one.name[: _NAME_SHOWN - 1] + "…"
    return [name, f"{one.messages:,}", f"{len(one.queues):,}", f"{one.bytes:,}", *times]


def _time(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S}"


def _document(found: Survey) -> dict[str, object]:
    from rocketstore.upgrade.survey import by_size

    return {
        "ok": not found.damaged and not found.refused,
        "directory": str(found.root),
        "member": found.is_member,
        "needs_import_unchecked": found.is_member and found.is_foreign,
        "min_offset": found.begin,
        "end_offset": found.end,
        "messages": found.messages,
        "topics": [
            {
                "topic": one.name,
                "messages": one.messages,
                "bytes": one.bytes,
                "queues": len(one.queues),
                "first_store_timestamp_ms": one.first_ms,
                "last_store_timestamp_ms": one.last_ms,
            }
            for one in by_size(found)
        ],
        "delayed_waiting": {str(level): count for level, count in sorted(found.delayed.items())},
        "open_transactions": found.open_halves,
        "groups": sorted(found.groups),
        "offsets": found.offsets,
        "comes_along": found.comes,
        "does_not_come_along": found.stays,
        "settings_without_effect": found.settings,
        "settings_refused": found.refused,
        "damaged": [{"file": str(one.path), "offset": one.offset, "reason": one.reason} for one in found.damaged],
        "to_do": found.todo,
    }
