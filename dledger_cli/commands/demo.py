"""``dledger demo``: three real processes store a text, lose their leader to SIGKILL, and prove that nothing is lost.

The lines are appended batch by batch as a producer whose sequence is the line number: whatever happens to a batch, it
is sent again, and the group stores only what it lacks. So "every line once, in order" must hold for the whole log, not
only for the acknowledged lines.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import rich
from rich.console import Console
from rich.text import Text

from dledger.client import DLedgerClient, ReadMode
from dledger.command_line import flag_values
from dledger.errors import DLedgerError
from dledger.types import Entry, LogIndex, Magic, NodeId, Term
from dledger_cli import terminal
from dledger_cli.console import CONSOLE_PACKAGES
from dledger_cli.local.group import LocalGroup, LocalGroupError
from dledger_cli.terminal import EXIT_CLOSED_PIPE, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from dledger.rpc.ports import NodeStatus
    from dledger_cli.console.server import DetachedConsole


@click.command(
    short_help="Watch a group lose its leader but no data.",
    epilog="""\b
Examples:
  dledger demo
  dledger demo --file /var/log/syslog
  dledger demo --console       then keep running with a web console: kill the leader yourself
  dledger demo --brokers       the page with three message brokers, a producer and consumers, until Ctrl-C
  dledger demo --keep          leave the three nodes running and print their addresses""",
)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Append the lines of this file; default: the source text of the installed packages.",
)
@click.option("--keep", is_flag=True, help="Leave the group running.")
@click.option("--console", is_flag=True, help="Keep the group and its web console running until Ctrl-C.")
@click.option(
    "--brokers", is_flag=True, help="Run three message brokers and their web console until Ctrl-C; no walkthrough."
)
def demo(file: Path | None, keep: bool, console: bool, brokers: bool) -> None:
    """Three nodes, a real text, SIGKILL for the leader in the middle, and the proof that nothing was lost."""
    if brokers and (file is not None or keep):
        raise click.UsageError("--brokers cannot be combined with --file or --keep")
    if keep and console:
        raise click.UsageError("--keep and --console exclude each other: choose one")
    if (console or brokers) and (missing := flag_values.missing_extra("console", "the console", CONSOLE_PACKAGES)):
        raise click.ClickException(missing)
    raise SystemExit(run_brokers() if brokers else run(file, keep=keep, console=console))


GENERATED_LINES: Final = 12_000
BATCH_LINES: Final = 50
READ_PAGE: Final = 1000
GIVE_UP_S: Final = 60.0
SEGMENTS: Final = {"segment_bytes": "256k", "index_segment_bytes": "64k"}
"""Small, so that the text fills several files."""


def run(file: Path | None, *, keep: bool, console: bool = False) -> int:
    """Run the whole demo; returns 0 only if the proof holds. ``console``: stay afterwards, with the group's page."""
    out = Console(highlight=False, soft_wrap=True, markup=False)
    lines = read_lines(file) if file else generated_lines()
    if len(lines) < 4 * BATCH_LINES:
        raise click.UsageError(f"the text is too short ({len(lines):,} of at least {4 * BATCH_LINES} lines)")
    directory = Path(tempfile.mkdtemp(prefix="dledger-demo-"))
    problems = ["the demo did not finish"]
    try:
        with LocalGroup(directory, settings=SEGMENTS, detached=keep) as group, _page(out, group, keep=keep) as page:
            problems = _tell(out, group, lines, file)
            if problems:
                group.close()
                page.close()
            elif console:
                stay(out, group, page.url)
            elif keep:
                _say_what_stays(out, group, page)
            else:
                _say_goodbye(out)
    except (KeyboardInterrupt, SystemExit) as end:
        problems, keep = [], False
        return _ended_early(out, end)
    except (LocalGroupError, DLedgerError) as error:
        problems = [str(error)]
    finally:
        if not keep and not problems:
            shutil.rmtree(directory)
    for problem in problems:
        out.print(_marked("✗", "red", problem))
    if problems:
        out.print(f"All data is kept in {directory}")
    return 1 if problems else 0


def run_brokers() -> int:
    """Three brokers, a producer and two consumer groups, to watch in the web console."""
    out = Console(highlight=False, soft_wrap=True, markup=False)
    from dledger_cli.local.brokers import LocalBrokers

    directory = Path(tempfile.mkdtemp(prefix="dledger-demo-"))
    try:
        with LocalBrokers(directory) as brokers, _page(out, brokers) as page:
            out.print(f"Three brokers in {directory}; {brokers.master()} is the master")
            stay(out, brokers, page.url)
    except (KeyboardInterrupt, SystemExit) as end:
        shutil.rmtree(directory)
        return _ended_early(out, end)
    except (LocalGroupError, DLedgerError) as error:
        out.print(_marked("✗", "red", f"{error}\nAll data is kept in {directory}"))
        return 1
    shutil.rmtree(directory)
    return 0


def _ended_early(out: Console, end: KeyboardInterrupt | SystemExit) -> int:
    """The exit code after Ctrl-C, or after nobody reads what is printed (``| head``), for which rich exits."""
    if isinstance(end, SystemExit):
        return EXIT_CLOSED_PIPE
    out.print("\nInterrupted; nothing is left running.")
    return EXIT_INTERRUPTED


@dataclass(slots=True)
class _Page:
    """The group's web console."""

    url: str = ""
    """Its address; empty if there is none."""
    kept: DetachedConsole | None = None
    """The process that stays with the group."""

    def close(self) -> None:
        """End what would stay."""
        if self.kept is not None:
            self.kept.close()


@contextmanager
def _page(out: Console, group: LocalGroup, *, keep: bool = False) -> Iterator[_Page]:
    """The group's web console, which runs during the block, or with ``keep`` on; empty if it is not installed."""
    if missing := flag_values.missing_extra("console", "To watch it in a browser: the console", CONSOLE_PACKAGES):
        out.print(f"{missing}\n")
        yield _Page()
        return
    from dledger_cli.console.server import DetachedConsole, open_console

    if keep:
        try:
            kept = DetachedConsole(group)
        except LocalGroupError as error:
            out.print(f"No page to watch it in a browser: {error}\n")
            yield _Page()
            return
        try:
            out.print(f"Watch it in a browser: {kept.url}\n")
            yield _Page(kept.url, kept)
        except BaseException:
            kept.close()
            raise
    else:
        with open_console(group) as server:
            out.print(f"Watch it in a browser: {server.url}\n")
            yield _Page(server.url)


def stay(out: Console, group: LocalGroup, url: str, *, ended: threading.Event | None = None) -> None:
    """Keep the group, its console and some load running until Ctrl-C, SIGTERM or ``ended``."""
    from dledger_cli.console.server import appending, trading
    from dledger_cli.local.brokers import LocalBrokers

    ended = ended or threading.Event()
    load = trading(group) if isinstance(group, LocalBrokers) else appending(group)
    with load, _ending_by_signal(ended):
        out.print(f"\nNow you: {url}\n", style="bold")
        out.print("  1. Open it. Writes never stop, so the bars and charts keep moving.")
        out.print("  2. Press Kill beside the leader: another node leads within about a second.")
        out.print("  3. Press Start beside the dead node and watch it catch up.")
        named = "" if group.name == "default" else f" -g {group.name}"
        out.print(
            f"\nIn a terminal: export DLEDGER_BOOTSTRAP={','.join(group.addresses)}; dledger status{named} --watch"
        )
        out.print("Ctrl-C ends everything.")
        while not ended.wait(0.5):  # in pieces: if another thread gets the signal, this one does not wake up before
            pass
    out.print("Ended.")


@contextmanager
def _ending_by_signal(ended: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set the event; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, lambda _number, _frame: ended.set()) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def read_lines(file: Path) -> list[bytes]:
    """The lines of a file, without line ends."""
    with file.open("rb") as stream:
        return [line.removesuffix(b"\n").removesuffix(b"\r") for line in stream]


def generated_lines(count: int = GENERATED_LINES) -> list[bytes]:
    """A real text available in every installation: the sources of the packages this one depends on."""
    lines: list[bytes] = []
    for package in (rich, click):
        root = Path(package.__path__[0])
        for source in sorted(root.rglob("*.py")):
            lines += read_lines(source)
            if len(lines) >= count:
                return lines[:count]
    return lines


# --- the story -------------------------------------------------------------------------------------------------------


def _tell(out: Console, group: LocalGroup, lines: Sequence[bytes], file: Path | None) -> list[str]:
    def done(sentence: str) -> None:
        out.print(_marked("✓", "green", sentence))

    out.print(f"A Raft group of three processes in {group.directory}\n")
    leader = group.leader()
    term = group.statuses()[leader].term
    done(f"{', '.join(group.nodes)} are running; {leader} was elected in term {term}")
    half, three_quarters = len(lines) // 2, len(lines) * 3 // 4
    with (
        closing(group.client()) as client,
        ThreadPoolExecutor(1) as helper,
        terminal.progress("appending", len(lines)) as advance,
    ):
        writer = Writer(client, lines, advance)
        started = time.monotonic()
        writer.write_until(half)
        rate = half / (time.monotonic() - started)
        what = file.name if file else "the installed packages' sources"
        done(f"{half:,} of {len(lines):,} lines of {what} appended, each flushed by a majority ({rate:,.0f} lines/s)")

        killing = helper.submit(_kill, group, leader)
        writer.watch_for_term_after(term)
        writer.write_until(three_quarters)
        killed_at = killing.result()
        failover_s = writer.new_leader_acknowledged_at - killed_at
        done(
            f"{leader} got SIGKILL while taking lines; {failover_s * 1000:,.0f} ms later its successor "
            "acknowledged the next ones"
        )
        done("lines in flight were resent under the same numbers, so none is stored twice")
        successor = group.leader(other_than=leader)
        done(f"{successor} leads, two of three nodes carry on; {three_quarters:,} lines are stored")

        restarting = helper.submit(group.start, leader)
        writer.write_until(len(lines))
        restarting.result()
    done(f"{leader} was restarted while the rest was appended; all {len(lines):,} lines are stored")
    statuses = group.wait_converged()
    done("the three nodes hold the same number of entries, all committed")
    problems = _prove(out, group, statuses, writer)
    if not problems:
        done(f"read from each node: all {len(lines):,} lines, each once, in order, at their acknowledged positions")
        done("the log files of the three nodes are identical, byte for byte")
        out.print(f"\nfailover: {failover_s * 1000:,.0f} ms from the kill to the first new acknowledgement")
    return problems


def _kill(group: LocalGroup, node: NodeId) -> float:
    """SIGKILL; returns the monotonic time just before it, so that the failover time is never too short."""
    at = time.monotonic()
    group.kill(node)
    return at


def _marked(mark: str, style: str, sentence: str) -> Text:
    return Text.assemble((mark, style), " ", sentence)


_PRODUCER: Final = "demo"


@dataclass(slots=True)
class Writer:
    """Appends lines in order and records the index of each."""

    client: DLedgerClient
    lines: Sequence[bytes]
    advance: Callable[[int], None]
    indexes: list[LogIndex] = field(default_factory=list)
    """The acknowledged index of each line."""
    new_leader_acknowledged_at: float = float("nan")
    _old_term: Term | None = None

    def watch_for_term_after(self, term: Term) -> None:
        """Record the time of the first acknowledgement from a term later than this."""
        self._old_term = term

    def write_until(self, count: int) -> None:
        """Append until ``count`` lines are in the log. Raises the last error after ``GIVE_UP_S`` without progress."""
        give_up_at = time.monotonic() + GIVE_UP_S
        while len(self.indexes) < count:
            batch = self.lines[len(self.indexes) : min(count, len(self.indexes) + BATCH_LINES)]
            try:
                self._append(batch)
                give_up_at = time.monotonic() + GIVE_UP_S
            except DLedgerError:
                if time.monotonic() > give_up_at:
                    raise

    def _append(self, batch: Sequence[bytes]) -> None:
        results = self.client.append_as(_PRODUCER, len(self.indexes), batch)
        if self._old_term is not None and results[0].term > self._old_term:
            self.new_leader_acknowledged_at = time.monotonic()
            self._old_term = None
        self.indexes += [result.index for result in results]
        self.advance(len(batch))


def read_entries(
    client: DLedgerClient, first_index: LogIndex, *, mode: ReadMode, address: str | None = None
) -> Iterator[Entry]:
    """Every committed entry from an index on."""
    while True:
        entries = client.read(first_index, count=READ_PAGE, mode=mode, address=address)
        if not entries:
            return
        yield from entries
        first_index = LogIndex(entries[-1].index + 1)


# --- the proof -------------------------------------------------------------------------------------------------------


def _prove(out: Console, group: LocalGroup, statuses: Mapping[NodeId, NodeStatus], writer: Writer) -> list[str]:
    problems: list[str] = []
    rows: list[Sequence[str]] = []
    digests: dict[NodeId, str] = {}
    with closing(group.client()) as client:
        for node, status in sorted(statuses.items()):
            address = group.nodes[node].client_address
            entries = list(read_entries(client, status.begin_index, mode=ReadMode.COMMITTED, address=address))
            problems += [f"{node}: {problem}" for problem in check_entries(entries, writer.lines, writer.indexes)]
            digests[node] = digest_of(group.store_dir(node) / "data", status.begin_position, status.end_position)
            count = sum(entry.magic is Magic.NORMAL for entry in entries)
            rows.append(
                (node, status.role, str(status.term), f"{count:,}", f"{status.end_position:,}", digests[node][:16])
            )
    if len(set(digests.values())) != 1:
        problems.append(f"the log files differ: {digests}")
    out.print()
    columns = ("node", "role", "term", "lines", "log bytes", "SHA-256 of them")
    terminal.print_table(columns, rows, {"LEADER": "green"}, least=("SHA-256 of them", "term", "log bytes"))
    out.print()
    return problems


def check_entries(entries: Sequence[Entry], lines: Sequence[bytes], indexes: Sequence[LogIndex]) -> list[str]:
    """Contradictions to "these are exactly the lines, once, in order, at the acknowledged indexes"."""
    problems: list[str] = []
    if any(second.index != first.index + 1 for first, second in pairwise(entries)):
        problems.append("the indexes have gaps")
    by_index = {entry.index: entry.body for entry in entries}
    lost = [number for number, index in enumerate(indexes) if by_index.get(index) != lines[number]]
    if lost:
        problems.append(f"{len(lost)} lines are not at their acknowledged positions; the first is line {lost[0] + 1}")
    bodies = [entry.body for entry in entries if entry.magic is Magic.NORMAL]
    if bodies != list(lines):
        problems.append(f"the log holds {len(bodies)} lines that are not the {len(lines)} lines of the text in order")
    return problems


def digest_of(data_dir: Path, begin: int, end: int) -> str:
    """SHA-256 of the log's bytes from ``begin`` to ``end``, over all segment files (named by their first byte)."""
    digest = hashlib.sha256()
    reached = begin
    for segment in sorted(path for path in data_dir.iterdir() if path.name.isdigit()):
        start = int(segment.name)
        stop = min(end, start + segment.stat().st_size)
        if reached < start or stop <= reached:
            continue
        with segment.open("rb") as stream:
            stream.seek(reached - start)
            digest.update(stream.read(stop - reached))
        reached = stop
    if reached != end:
        raise LocalGroupError(f"{data_dir}: the segment files end at {reached}, the log at {end}")
    return digest.hexdigest()


def spark_lines(addresses: str) -> tuple[str, ...]:
    """Python lines that use a running group from Spark: a session; read, follow, write. See docs/spark.md."""
    return (
        "from dledger_spark import spark_session; spark = spark_session(); "
        f'log = {{"bootstrap.servers": "{addresses}"}}',
        'spark.read.format("dledger").options(**log).load().selectExpr("index", "string(body)").show()',
        'query = spark.readStream.format("dledger").options(**log).load().selectExpr("index", "string(body)")'
        '.writeStream.format("console").start()',
        'spark.createDataFrame([("hello from Spark",)], "body string")'
        '.write.format("dledger").options(**log).mode("append").save()',
    )


def _say_what_stays(out: Console, group: LocalGroup, page: _Page) -> None:
    addresses = ",".join(group.addresses)
    pids = [group.pid(node) for node in group.nodes] + ([page.kept.pid] if page.kept is not None else [])
    bin_directory = Path(sys.executable).parent
    out.print(f"\nThe group keeps running. Clients connect to\n\n    export DLEDGER_BOOTSTRAP={addresses}")
    if shutil.which("dledger") is None:
        out.print(f"    export PATH={bin_directory}:$PATH")
    out.print("\nLook at it:       dledger status --watch")
    out.print(f"In a browser:     {page.url or 'dledger console'}")
    out.print("Write, read:      dledger append hello; dledger tail -f")
    out.print("Move the leader:  dledger transfer-leader")
    missing = flag_values.missing_extra("spark", "Spark", ("pyspark", "pyarrow"))
    first = f" (first: {flag_values.install_command('spark')})" if missing else ""
    out.print(f"With Spark:       in {sys.executable}, one line after the other{first}:\n")
    for line in spark_lines(addresses):
        out.print(f"    {line}")
    out.print()
    out.print(f"End it:           kill -9 {' '.join(map(str, pids))}; rm -r {group.directory}")


def _say_goodbye(out: Console) -> None:
    out.print("\nWhere to go next:")
    out.print(
        "  dledger demo --console  the same, then keeps the group and its web console running: kill the leader yourself"
    )
    out.print("  dledger demo --brokers  message brokers instead: topics, consumers and messages in the console")
    out.print("  dledger demo --keep     the same, then leaves the group running for you")
    out.print("  dledger serve --help    run your own nodes")
    out.print("  README.md               a five-minute tour")
