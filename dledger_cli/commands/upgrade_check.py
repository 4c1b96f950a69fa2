"""``dledger upgrade check``: may stopped plain brokers start as one group? With ``--from``: what comes along."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dledger.errors import ConfigError
from dledger_cli import terminal

if TYPE_CHECKING:  # imported only when the command runs
    from rocketstore.store.directory import StoreDirectory
    from rocketstore.upgrade.compare import Compared, Divergence, OldLog, OldMember, RecordAt
    from rocketstore.upgrade.survey import Survey, TopicSurvey

_STYLES = {"equal": "green", "behind": "yellow", "ahead": "yellow", "differs": "red", "damaged": "red"}


@dataclass(slots=True)
class _Result:
    """The findings. ``problems`` forbid a start, ``notes`` do not."""

    reference: str
    compared: list[Compared]
    divided: int
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    aligned: list[str] = field(default_factory=list)
    """The steps that were, or would be done to make them equal."""

    @property
    def may_start(self) -> bool:
        """Whether these brokers may become a group as they are."""
        return not self.problems and all(one.is_ready for one in self.compared)


@click.command(
    short_help="Check what stands between brokers and a group.",
    epilog="""\b
Examples:
  dledger upgrade check --nodes /data/a,/data/b,/mnt/c       three stopped brokers' storePathRootDir
  dledger upgrade check -c n0.conf -c n1.conf -c n2.conf     the same by their conf files, which must agree
  dledger upgrade check --nodes /data/a,/data/b --json | jq .nodes
  dledger upgrade check --nodes /data/a,/data/b,/data/c --align --dry-run
  dledger upgrade check --nodes /data/a,/data/b --spark      large logs, on all processors
  dledger upgrade check --from ~/store -c broker.conf        what will come along?

In DLedger mode a group continues the logs that its members had as plain brokers; only new messages are replicated, so
the old ones must be equal. This reads and verifies every record of each log (RocketMQ's guide compares the last files
with md5sum), and names the first message that differs. An empty directory is a member to be. Directories of other
machines must be mounted. Stop the brokers first, and start none until the check passes.

--align copies to members that are behind what they lack, and to empty ones everything, from the longest log or the
one named with --master. A log that differs is replaced only if you name it with --discard; nothing is deleted.

--from says what a directory holds, by topic, what waits, and what of it will not be there: before it is moved here.

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
@click.option("--align", is_flag=True, help="Copy to those that are behind what they lack, from the master.")
@click.option("--dry-run", is_flag=True, help="With --align: only say what it would do.")
@click.option(
    "--discard",
    multiple=True,
    metavar="DIR",
    help="With --align: replace all of this directory's log; the old files are kept, renamed. May be repeated.",
)
@click.option(
    "--from",
    "source",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Say what of this broker's or member's directory, RocketMQ's or ours, will be there once it is opened here.",
)
@click.option(
    "--spark",
    is_flag=False,
    flag_value="local[*]",
    metavar="[URL]",
    help="Read the logs on Spark: on this machine's processors, or where URL says; workers need the same paths.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def check(  # noqa: PLR0913  # one parameter per option
    nodes: tuple[str, ...],
    conf_files: tuple[Path, ...],
    master: str | None,
    align: bool,
    dry_run: bool,
    discard: tuple[str, ...],
    source: Path | None,
    spark: str | None,
    as_json: bool,
) -> None:
    """Check whether the stopped plain brokers in DIR,DIR,… may start as one group."""
    if source is not None:
        if nodes or master or align or dry_run or discard or spark:
            raise click.UsageError("--from looks at one directory by itself: it goes with -c and --json only")

        raise SystemExit(run_survey(source, conf_files, as_json=as_json))
    roots = [Path(part.strip()) for text in nodes for part in text.split(",") if part.strip()]
    if not roots and not conf_files:
        raise click.UsageError("name the future members' directories with --nodes, or their conf files with -c")
    if max(len(roots), len(conf_files)) < 2:
        raise click.UsageError("a comparison takes at least two directories: name all future members")
    if (dry_run or discard) and not align:
        raise click.UsageError("--dry-run and --discard say how to align: use them with --align")
    from rocketstore.upgrade.compare import find_members

    members = find_members(roots, conf_files)
    named = "" if master is None else _named(members, master, "--master")
    give_up = {_named(members, one, "--discard") for one in discard}
    if named in give_up:
        raise ConfigError([f"{master} cannot be both --master and --discard"])
    with ExitStack() as held:
        locks = _lock(members, held) if align and not dry_run else {}
        result = _compare(members, _read(members, spark=spark), named, is_locked=bool(locks))
        if align:
            if result.may_start and not as_json:
                click.echo("there is nothing to align")
            aligned = _align(members, result, _Wish(named, give_up, locks, as_json))
            if aligned:
                logs = [one.log for one in result.compared]
                done = result.aligned
                result = _compare(members, _read(members, logs, aligned), result.reference, is_locked=True)
                result.aligned = done
    _print(result, as_json)
    raise SystemExit(0 if result.may_start else 1)


def _named(members: list[OldMember], directory: str, option: str) -> str:
    """The name of the member with this directory. Raises ``ConfigError``."""
    found = [one.name for one in members if one.root.resolve() == Path(directory).resolve()]
    if not found:
        raise ConfigError([f"{option} {directory} is not among the directories to be compared"])
    return found[0]


def _compare(members: list[OldMember], logs: list[OldLog], master: str, *, is_locked: bool) -> _Result:
    from rocketstore.upgrade.compare import compare, in_use, reference_of, setting_problems, state_differences

    reference = reference_of(logs, master)
    result = _Result(reference.name, compare(logs, reference), reference.digest.divided)
    result.problems += setting_problems(members)
    source = next(one for one in members if one.name == reference.name)
    for member, log in zip(members, logs, strict=True):
        is_running = not is_locked and in_use(member.root)
        if is_running:
            result.problems.append(f"{member.name}: a broker is using {member.root}: stop it, and check again")
        _add_member(member, log, result, is_running=is_running)
        if log is not reference:
            result.notes += state_differences(member, source)
    return result


def _read(
    members: list[OldMember],
    known: Sequence[OldLog] = (),
    changed: Container[str] = (),
    spark: str | None = None,
) -> list[OldLog]:
    """Read all logs; of those that are ``known``, only the ones of ``changed`` members."""
    from rocketstore.commit_log.base_log import digest_log, digest_of, find_plain_files
    from rocketstore.upgrade.compare import OldLog

    logs = {one.name: one for one in known if one.name not in changed}
    todo = [
        (one, find_plain_files([path for path in one.log_dirs if path.is_dir()], one.segment_bytes))
        for one in members
        if one.name not in logs
    ]
    if spark is not None:
        from dledger_spark.jobs.command import require_spark

        require_spark()  # the next module is one of Spark's
        from dledger_spark.jobs.old_logs import digest_on_spark

        digests = digest_on_spark([files for _, files in todo], spark)
        return [
            OldLog(member.name, files, digest_of(files, found))
            for (member, files), found in zip(todo, digests, strict=True)
        ]
    with terminal.progress("reading the logs, file by file", sum(len(files.paths) for _, files in todo)) as advance:
        for member, files in todo:
            logs[member.name] = OldLog(member.name, files, digest_log(files, lambda: advance(1)))
    return [logs[one.name] for one in members]


def _add_member(member: OldMember, log: OldLog, result: _Result, *, is_running: bool) -> None:
    """Add the problems and notes about one member by itself."""
    name, digest = member.name, log.digest
    result.problems += [f"{name}: {one.path}: offset {one.offset}: {one.reason}" for one in digest.problems]
    if log.files.paths and member.segment_bytes not in (0, log.files.segment_bytes):
        result.problems.append(
            f"{member.conf_file}: mappedFileSizeCommitLog={member.segment_bytes}, but the log's files have "
            f"{log.files.segment_bytes} bytes"
        )
    if member.group_log is not None:
        result.notes.append(f"{name}: has begun as a member of a group already ({member.group_log})")
    if is_running:
        return
    if not member.stopped_cleanly:
        torn = "" if digest.torn is None else f", and a torn end at {digest.torn.path}: offset {digest.torn.offset}"
        result.notes.append(
            f"{name}: was not stopped cleanly{torn}; the next start checks the end of its log, and its queues"
        )
    elif digest.torn is not None:
        place = f"{digest.torn.path}: offset {digest.torn.offset}"
        result.problems.append(f"{name}: {place}: {digest.torn.reason}, although it was stopped cleanly")


# --- aligning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish:
    """The user's choices: the master, which members to give up, and their locks; none for a dry run."""

    master: str
    give_up: set[str]
    locks: Mapping[str, StoreDirectory]
    as_json: bool


def _lock(members: list[OldMember], held: ExitStack) -> dict[str, StoreDirectory]:
    """Keep brokers from starting meanwhile. Raises ``DirectoryLockedError``."""
    from dledger.store.fs import FileSystem
    from rocketstore.store.directory import StoreDirectory

    locks = {}
    for member in members:
        locks[member.name] = StoreDirectory(member.root, FileSystem())
        held.callback(locks[member.name].release)
    return locks


def _align(members: list[OldMember], result: _Result, wish: _Wish) -> list[str]:
    """Make the members equal that can be; returns their names. A member that cannot becomes a problem."""
    from dledger.store.fs import FileSystem
    from rocketstore.upgrade.align import align, plan, room_problems

    apart = [one.log.name for one in result.compared if one.standing in ("differs", "ahead", "damaged")]
    if apart and not wish.master:
        result.problems.append(
            f"not aligned: {', '.join(apart)} cannot be continued by {result.reference}'s log: say with --master DIR "
            "which log is right"
        )
        return []
    source, reference = next(
        (member, one.log)
        for member, one in zip(members, result.compared, strict=True)
        if member.name == result.reference
    )
    steps, refused = plan(members, result.compared, reference, wish.give_up)
    if not refused:
        refused = room_problems(steps, source, reference, FileSystem())
    result.problems += [f"not aligned: {one}" for one in refused]
    will = bool(wish.locks) and not refused
    result.aligned = [("" if will else "would be done: ") + one.sentence(reference.name) for one in steps]
    if not wish.as_json:
        for sentence in result.aligned:
            click.echo(sentence)
    if not will:
        return []
    with terminal.progress("copying bytes", sum(one.bytes_in_all for one in steps)) as advance:
        for step in steps:
            for path in align(step, wish.locks[step.member.name], source, reference, FileSystem(), advance):
                click.echo(f"{step.member.name}: what it had is in {path}", err=True)
    return [one.member.name for one in steps]


# --- printing ---------------------------------------------------------------------------------------------------------


def _print(result: _Result, as_json: bool) -> None:
    if as_json:
        terminal.print_json(_document(result))
        return
    all_equal = all(one.is_ready for one in result.compared)
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
    if one.lacks_from is not None:
        begins = f"begins at offset {one.log.digest.min_offset:,} and lacks the messages from {one.lacks_from:,} on"
        return [f"BEHIND: {name} {begins}, which others have", *_said(replace(one, lacks_from=None), reference)]
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
    if found.is_same_message:
        return (
            f"{name} and {reference} at offset {found.offset:,}: both have {found.found.sentence()}, but the byte at "
            f"{found.byte:,} differs, which no checksum covers: one of {found.file} and {found.other_file} is damaged"
        )
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
            "and replace the others by copies of it (--align --master DIR --discard DIR)"
        )
    if "damaged" in standings:
        return f"{said}: a log is damaged. Replace it by a copy of a sound one"
    if standings & {"behind", "ahead"} or any(one.lacks_from is not None for one in result.compared):
        return f"{said}: let those that are behind follow the master until they are equal, or use --align"
    return f"{said} before the problems above are solved"


def _document(result: _Result) -> dict[str, object]:
    return {
        "ok": result.may_start,
        "reference": result.reference,
        "divided": result.divided,
        "nodes": [_node_json(one) for one in result.compared],
        "problems": result.problems,
        "notes": result.notes,
        "aligned": result.aligned,
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
        "lacks_from": one.lacks_from,
        "divergence": None
        if found is None
        else {
            "offset": found.offset,
            "first_byte": found.byte,
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


_TOPICS_SHOWN = 100
_NAME_SHOWN = 40


def run_survey(directory: Path, conf_files: tuple[Path, ...], *, as_json: bool) -> int:
    """Survey the directory and print the result; returns the exit code."""
    if len(conf_files) > 1:
        raise click.UsageError("--from looks at one directory: give one conf file at most")
    if not directory.is_dir():
        raise ConfigError([f"{directory} is not a directory"])
    from rocketstore.upgrade.compare import in_use
    from rocketstore.upgrade.survey import survey

    with terminal.progress(f"reading {directory}", None):
        found = survey(directory, conf_files[0] if conf_files else None)
    if in_use(directory):
        found.todo.insert(0, f"a broker is using {directory}: stop it, and look again")
    if as_json:
        terminal.print_json(_survey_document(found))
    else:
        _print_survey(found)
    return 1 if found.damaged or found.refused else 0


def _print_survey(found: Survey) -> None:
    from rocketstore.upgrade.survey import by_size

    kind = "member of a group" if found.is_member else "plain broker"
    click.echo(f"{found.root}: {kind}, offsets {found.begin:,} to {found.end:,}")
    topics = list(by_size(found))
    if topics:
        rows = [_topic_row(one) for one in topics[:_TOPICS_SHOWN]]
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


def _topic_row(one: TopicSurvey) -> list[str]:
    times = (_time(one.first_ms), _time(one.last_ms))
    name = one.name if len(one.name) <= _NAME_SHOWN else one.name[: _NAME_SHOWN - 1] + "…"
    return [name, f"{one.messages:,}", f"{len(one.queues):,}", f"{one.bytes:,}", *times]


def _time(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S}"


def _survey_document(found: Survey) -> dict[str, object]:
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
