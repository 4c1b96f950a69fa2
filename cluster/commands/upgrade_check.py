"""``dledger upgrade check``: whether stopped plain brokers may start as one group."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster import terminal
from dledger.errors import ConfigError

if TYPE_CHECKING:  # imported only when the command runs
    from rocketstore.upgrade.compare import Compared, Divergence, OldLog, RecordAt
    from rocketstore.upgrade.members import OldMember

_STYLES = {"equal": "green", "behind": "yellow", "ahead": "yellow", "differs": "red", "damaged": "red"}


@dataclass(slots=True)
class _Result:
    """What was found. ``problems`` forbid a start, ``notes`` do not."""

    reference: str
    compared: list[Compared]
    divided: int
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def may_start(self) -> bool:
        """Whether these brokers may become a group as they are."""
        return not self.problems and all(one.standing == "equal" for one in self.compared)


@click.command(
    short_help="Compare the logs of brokers that shall become a group.",
    epilog="""\b
Examples:
  dledger upgrade check --nodes /data/a,/data/b,/mnt/c       three stopped brokers' storePathRootDir
  dledger upgrade check -c n0.conf -c n1.conf -c n2.conf     the same by their conf files, which must agree
  dledger upgrade check --nodes /data/a,/data/b --json | jq .nodes

In DLedger mode a group continues the logs that its members had as plain brokers; only new messages are replicated, so
the old ones must be equal. This reads and verifies every record of each log (RocketMQ's guide compares the last files
with md5sum), and names the first message that differs. An empty directory is a member to be. Directories of other
machines must be mounted. Stop the brokers first, and start none until the check passes.

Exit code 0: they may start as a group; 1: not, for the reasons given; 2: these are not brokers' directories.""",
)
@click.option(
    "--nodes",
    "nodes",
    multiple=True,
    metavar="DIR,DIR,…",
    help="Root directories (storePathRootDir) of all future members; may be repeated.",
)
@click.option(
    "-c",
    "--conf-file",
    "conf_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A member's conf file, one for each, in the order of --nodes or instead of it.",
)
@click.option("--master", metavar="DIR", help="The directory to compare with; default: the one with the longest log.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def check(nodes: tuple[str, ...], conf_files: tuple[Path, ...], master: str | None, as_json: bool) -> None:
    """Check whether the stopped plain brokers in DIR,DIR,… may start as one group."""
    roots = [Path(part.strip()) for text in nodes for part in text.split(",") if part.strip()]
    if not roots and not conf_files:
        raise click.UsageError("name the future members' directories with --nodes, or their conf files with -c")
    if max(len(roots), len(conf_files)) < 2:
        raise click.UsageError("a comparison takes at least two directories: name all future members")
    from rocketstore.upgrade.members import find_members

    members = find_members(roots, conf_files)
    result = _compare(members, _named(members, master))
    _print(result, as_json)
    raise SystemExit(0 if result.may_start else 1)


def _named(members: list[OldMember], master: str | None) -> str:
    """The name of the member with this directory. Raises ``ConfigError``."""
    if master is None:
        return ""
    found = [one.name for one in members if one.root.resolve() == Path(master).resolve()]
    if not found:
        raise ConfigError([f"--master {master} is none of the directories to be compared"])
    return found[0]


def _compare(members: list[OldMember], master: str) -> _Result:
    from rocketstore.upgrade.agreement import setting_problems, state_differences
    from rocketstore.upgrade.compare import compare, reference_of

    logs = _read(members)
    reference = reference_of(logs, master)
    result = _Result(reference.name, compare(logs, reference), reference.digest.divided)
    result.problems += setting_problems(members)
    known = {one.name: one for one in members}
    for log in logs:
        _add_member(known[log.name], log, result)
        if log is not reference:
            result.notes += state_differences(known[log.name], known[reference.name])
    return result


def _read(members: list[OldMember]) -> list[OldLog]:
    from rocketstore.commit_log.digests import digest_log, find_plain_files
    from rocketstore.upgrade.compare import OldLog

    found = [
        (one, find_plain_files([path for path in one.log_dirs if path.is_dir()], one.segment_bytes)) for one in members
    ]
    total = sum(len(files.paths) for _, files in found)
    with terminal.progress("reading the logs, file by file", total) as advance:
        return [OldLog(member.name, files, digest_log(files, lambda: advance(1))) for member, files in found]


def _add_member(member: OldMember, log: OldLog, result: _Result) -> None:
    """What is to be said of one member by itself."""
    from rocketstore.upgrade.members import in_use

    name, digest = member.name, log.digest
    if in_use(member.root):
        result.problems.append(f"{name}: a broker is using {member.root}: stop it, and check again")
    result.problems += [f"{name}: {one.path}: offset {one.offset}: {one.reason}" for one in digest.problems]
    if log.files.paths and member.segment_bytes not in (0, log.files.segment_bytes):
        result.problems.append(
            f"{member.conf_file}: mappedFileSizeCommitLog={member.segment_bytes}, but the log's files have "
            f"{log.files.segment_bytes} bytes"
        )
    if member.group_log is not None:
        result.notes.append(f"{name}: has begun as a member of a group already ({member.group_log})")
    if not member.stopped_cleanly:
        torn = "" if digest.torn is None else f", and a torn end at {digest.torn.path}: offset {digest.torn.offset}"
        result.notes.append(f"{name}: was not stopped cleanly{torn}; the next start cuts what is not whole")
    elif digest.torn is not None:
        place = f"{digest.torn.path}: offset {digest.torn.offset}"
        result.problems.append(f"{name}: {place}: {digest.torn.reason}, although it was stopped cleanly")


# --- printing ---------------------------------------------------------------------------------------------------------


def _print(result: _Result, as_json: bool) -> None:
    if as_json:
        terminal.print_json(_document(result))
        return
    all_equal = {one.standing for one in result.compared} == {"equal"}
    rows = [_row(one, "" if all_equal else result.reference) for one in result.compared]
    terminal.print_table(
        ("node", "log", "messages", "begins", "ends", "apart"), rows, _STYLES, least=("begins", "ends", "messages")
    )
    for compared in result.compared:
        for line in _said(compared, result.reference):
            click.echo(line)
    for problem in result.problems:
        click.echo(f"PROBLEM: {problem}")
    for note in result.notes:
        click.echo(f"note: {note}")
    click.echo(_verdict(result))


def _row(one: Compared, reference: str) -> list[str]:
    digest = one.log.digest
    apart = f"{one.bytes_apart:,} bytes" if one.bytes_apart else ""
    return [
        one.log.name,
        "reference" if one.log.name == reference and one.standing == "equal" else str(one.standing),
        f"{sum(file.records for file in digest.files):,}",
        f"{digest.min_offset:,}",
        f"{digest.end:,}",
        apart,
    ]


def _said(one: Compared, reference: str) -> list[str]:
    """Sentences about a member that is not equal."""
    name = one.log.name
    if one.divergence is not None:
        return [f"DIFFERS: {_divergence_text(one.divergence, name, reference)}"]
    apart = f"{one.messages_apart:,} messages ({one.bytes_apart:,} bytes)"
    if one.standing == "behind":
        return [f"BEHIND: {name} ends at offset {one.log.digest.end:,} and lacks {apart} that {reference} has"]
    if one.standing == "ahead":
        return [f"AHEAD: {name} has {apart} that {reference} lacks"]
    if one.standing == "differs":
        return [
            f"DIFFERS: {name}: the log's files have {one.log.files.segment_bytes:,} bytes, those of {reference} not"
        ]
    return []


def _divergence_text(found: Divergence, name: str, reference: str) -> str:
    return (
        f"{name} and {reference} at offset {found.offset:,}: {name} has {found.found.sentence()} ({found.file}), "
        f"{reference} has {found.other_found.sentence()} ({found.other_file})"
    )


def _verdict(result: _Result) -> str:
    standings = {str(one.standing) for one in result.compared}
    if result.may_start:
        empty = not any(one.log.digest.files for one in result.compared)
        found = "there are no old messages" if empty else "the old logs are equal"
        return f"{found}: these brokers may start as a group, which goes on at offset {result.divided:,}"
    said = "do not start these brokers as a group"
    if "differs" in standings:
        return (
            f"{said}: their logs hold different messages. Find out which one is right (usually the last master's), "
            "and replace the others by copies of it"
        )
    if "damaged" in standings:
        return f"{said}: a log is damaged. Replace it by a copy of a sound one"
    if standings & {"behind", "ahead"}:
        return f"{said}: let those that are behind follow the master until they are equal, or copy its log"
    return f"{said} before the problems above are solved"


def _document(result: _Result) -> dict[str, object]:
    return {
        "ok": result.may_start,
        "reference": result.reference,
        "divided": result.divided,
        "nodes": [_node_json(one) for one in result.compared],
        "problems": result.problems,
        "notes": result.notes,
    }


def _node_json(one: Compared) -> dict[str, object]:
    digest, found = one.log.digest, one.divergence
    return {
        "name": one.log.name,
        "standing": str(one.standing),
        "segment_bytes": digest.segment_bytes,
        "min_offset": digest.min_offset,
        "end_offset": digest.end,
        "messages": sum(file.records for file in digest.files),
        "bytes_apart": one.bytes_apart,
        "messages_apart": one.messages_apart,
        "divergence": None
        if found is None
        else {
            "offset": found.offset,
            "file": str(found.file),
            "reference_file": str(found.other_file),
            "found": _record_json(found.found),
            "reference": _record_json(found.other_found),
        },
        "files": [{"base": file.base, "bytes": file.length, "crc32c": f"{file.crc32c:08x}"} for file in digest.files],
    }


def _record_json(one: RecordAt) -> dict[str, object]:
    return {
        "what": one.what,
        "topic": one.topic,
        "queue_id": one.queue_id,
        "queue_offset": one.queue_offset,
        "keys": one.keys,
        "store_timestamp_ms": one.store_timestamp,
    }
