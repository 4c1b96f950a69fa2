"""``dledger inspect``: verifies and dumps a node's files offline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dledger.core.noops import describe_payload
from dledger.errors import ConfigError
from dledger.store.format import EntryHeader, magic_of
from dledger.store.inspect import (
    BlankItem,
    DataItem,
    EndItem,
    ProblemItem,
    RecordItem,
    UnitItem,
    begin_of,
    inspect_data,
    inspect_index,
    problems,
    segment_paths,
)
from dledger.store.verify import PROBLEMS_MAX, is_node_directory
from dledger.types import Magic
from dledger_cli import terminal

BODY_PREVIEW_BYTES = 60


@click.command(
    "inspect",
    short_help="Verify or dump a node's files.",
    epilog="""\b
Examples:
  dledger inspect /var/lib/dledger/dledger-n0            every file, its entries, the first bad offset
  dledger inspect /var/lib/dledger                       the same, when it holds one node
  dledger inspect dledger-n0 --dump | less               every entry, blank and problem
  dledger inspect dledger-n0 --json | jq .problems

Read-only, for a stopped node (the very end of a running one may look torn). Exit code 1 when
something is damaged; `dledger serve --repair` then fetches the log again from the other members.""",
)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the segments, if not DIR/data (may be repeated).",
)
@click.option("--dump", is_flag=True, help="Print every entry, not only a summary.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; with --dump one object per line.")
def inspect(directory: Path, data_dirs: tuple[Path, ...], dump: bool, as_json: bool) -> None:
    """Verify the segment and index files in DIR, offline: every header, checksum, chain and index unit."""
    node_dir = node_directory(directory)
    if not data_dirs and not (node_dir / "data").is_dir():
        raise ConfigError([f"{node_dir} has no data/: name the directory of its segments with --data-dir"])
    data_dirs = data_dirs or (node_dir / "data",)
    data = sorted((path for one in data_dirs for path in segment_paths(one)), key=lambda path: path.name)
    if dump:
        damaged = _dump(inspect_data(data, begin_of(node_dir)), as_json)
    else:
        damaged = _summary(node_dir, data_dirs, data, as_json)
    raise SystemExit(1 if damaged else 0)


def node_directory(directory: Path) -> Path:
    """A node's directory, or the only one in ``directory``. Raises ``ConfigError``."""
    if is_node_directory(directory):
        return directory
    named = sorted(path for path in directory.glob("dledger-*") if path.is_dir())
    nodes = [path for path in named if is_node_directory(path)]
    if len(nodes) == 1:
        return nodes[0]
    held = ", ".join(path.name for path in named) or "no dledger-… directory"
    raise ConfigError([f"{directory} is not a node's directory (it holds {held}): name one that has data/ and index/"])


# --- dump ------------------------------------------------------------------------------------------------------------


def _dump(items: Iterator[DataItem], as_json: bool) -> bool:
    damaged = False
    for item in items:
        damaged |= isinstance(item, ProblemItem)
        if as_json:
            terminal.print_json(_item_json(item))
        else:
            click.echo(_item_line(item))
    return damaged


def _item_json(item: DataItem) -> dict[str, object]:
    place: dict[str, object] = {"file": str(item.path), "offset": item.offset}
    match item:
        case RecordItem(header=header, body=body):
            names = ("index", "term", "position", "size", "channel", "chain_crc", "body_crc")
            fields = {name: getattr(header, name) for name in names}
            told = {"producers": said} if (said := _said(header, body)) else {}
            return {"type": _kind(header), **place, **fields, **told, "body": body.decode(errors="backslashreplace")}
        case BlankItem(length=length):
            return {"type": "BLANK", **place, "length": length}
        case EndItem():
            return {"type": "END", **place}
        case ProblemItem(reason=reason):
            return {"type": "PROBLEM", **place, "reason": reason}


def _item_line(item: DataItem) -> str:
    place = f"{item.path.name}+{item.offset}"
    match item:
        case RecordItem(header=header, body=body):
            preview = ascii(body[:BODY_PREVIEW_BYTES].decode(errors="backslashreplace"))[1:-1]
            more = "…" if len(body) > BODY_PREVIEW_BYTES else ""
            kind = "" if (name := _kind(header)) == Magic.NORMAL.name else f" {name}"
            text = _said(header, body) or preview + more
            return f"{place}  index {header.index} term {header.term}{kind} {len(body)} bytes  {text}"
        case BlankItem(length=length):
            return f"{place}  blank of {length} bytes"
        case EndItem():
            return f"{place}  end, zeros follow"
        case ProblemItem(reason=reason):
            return f"{place}  DAMAGED: {reason}"


def _said(header: EntryHeader, body: bytes) -> str:
    """A NOOP's producer payload in words; empty for other entries."""
    return describe_payload(body) if _kind(header) == Magic.NOOP.name else ""


def _kind(header: EntryHeader) -> str:
    return magic_of(header.magic, header.channel).name if header.magic in set(Magic) else str(header.magic)


# --- summary ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _FileSummary:
    """The contents of one file."""

    path: Path
    kind: str
    entries: int = 0
    first_index: int | None = None
    last_index: int | None = None
    end_offset: int = 0
    first_bad_offset: int | None = None

    def see(self, index: int, end_offset: int) -> None:
        self.entries += 1
        self.first_index = index if self.first_index is None else self.first_index
        self.last_index = index
        self.end_offset = end_offset


def _summary(node_dir: Path, data_dirs: tuple[Path, ...], data: list[Path], as_json: bool) -> bool:
    files = {path: _FileSummary(path, "data") for path in data}
    for item in inspect_data(data, begin_of(node_dir)):
        match item:
            case RecordItem(path=path, offset=offset, header=header):
                files[path].see(header.index, offset + header.size)
            case ProblemItem(path=path, offset=offset):
                files[path].first_bad_offset = offset
            case BlankItem() | EndItem():
                pass
    index_paths = segment_paths(node_dir / "index") if (node_dir / "index").is_dir() else []
    files |= {path: _FileSummary(path, "index") for path in index_paths}
    for unit in inspect_index(index_paths):
        if isinstance(unit, UnitItem):
            files[unit.path].see(unit.unit.index, unit.offset + 32)
        elif isinstance(unit, ProblemItem):
            files[unit.path].first_bad_offset = unit.offset
    every = problems(node_dir, data_dirs) if index_paths else iter([
        ProblemItem(node_dir / "index", 0, "no index files: they are rebuilt when the node starts")
    ])  # fmt: skip
    found = list(itertools.islice(every, PROBLEMS_MAX))
    unlisted = sum(1 for _ in every)
    _print_summary(node_dir, list(files.values()), found, unlisted, as_json)
    return bool(found)


def _print_summary(
    node_dir: Path, files: Sequence[_FileSummary], found: Sequence[ProblemItem], unlisted: int, as_json: bool
) -> None:
    if as_json:
        names = ("kind", "entries", "first_index", "last_index", "end_offset", "first_bad_offset")
        described = [{"file": str(one.path), **{name: getattr(one, name) for name in names}} for one in files]
        listed = [{"file": str(one.path), "offset": one.offset, "reason": one.reason} for one in found]
        document = {
            "directory": str(node_dir),
            "ok": not found,
            "files": described,
            "problem_count": len(found) + unlisted,
            "problems": listed,
        }
        terminal.print_json(document)
        return
    rows = [
        (
            str(one.path.relative_to(node_dir) if one.path.is_relative_to(node_dir) else one.path),
            f"{one.entries:,}",
            *("" if figure is None else str(figure) for figure in (one.first_index, one.last_index)),
            f"{one.end_offset:,}",
            "" if one.first_bad_offset is None else str(one.first_bad_offset),
        )
        for one in files
    ]
    terminal.print_table(("file", "entries", "first index", "last index", "bytes", "first bad offset"), rows)
    for problem in found:
        click.echo(f"DAMAGED: {problem.path}: offset {problem.offset}: {problem.reason}")
    if unlisted:
        click.echo(f"DAMAGED: {unlisted:,} more problems are not listed")
    if not found:
        click.echo("no problems found")
