"""The commands against a fake client: what they print, where, and with which exit code."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dledger.config import FlushMode, ServerConfig
from dledger.core.noop_payload import Registration, encode_registration
from dledger.errors import (
    DiskFullError,
    DLedgerError,
    LeaderHint,
    LeaderNotReadyError,
    QuorumAckTimeoutError,
    TransferFailedError,
    UnavailableError,
)
from dledger.monitoring import Condition
from dledger.rpc.ports import MemberStatus, NodeStatus
from dledger.types import Entry, LogIndex, Magic, NodeId, Position, Role, Term
from dledger_cli import cli, targets, terminal
from dledger_cli.commands import demo
from dledger_cli.commands import serve as serve_module
from tests.support.fake_group import fake_group
from tests.support.pipes import named_pipe


@dataclass(frozen=True)
class FakeResult:
    index: int
    term: int
    position: int


class FakeFuture:
    def __init__(self, outcome: FakeResult | DLedgerError) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> FakeResult:
        if isinstance(self._outcome, DLedgerError):
            raise self._outcome
        return self._outcome


@dataclass
class FakeClient:
    """A log in a list; ``failures`` maps a body to the error that its append meets."""

    entries: list[Entry] = field(default_factory=list)
    failures: Mapping[bytes, DLedgerError] = field(default_factory=dict)
    members: dict[NodeId, NodeStatus | DLedgerError] = field(default_factory=dict)
    transfer: LeaderHint | DLedgerError = field(default_factory=lambda: LeaderHint(NodeId("n1")))
    calls: list[tuple[object, ...]] = field(default_factory=list)
    closed: bool = False
    numbers: bool | None = None
    """Whether it registers as a producer; None before it is connected."""

    def put(self, body: bytes, magic: Magic = Magic.NORMAL) -> FakeResult:
        index = len(self.entries)
        position = sum(48 + len(entry.body) for entry in self.entries)
        self.entries.append(Entry(LogIndex(index), Term(1), Position(position), body, magic))
        return FakeResult(index, 1, position)

    def append_many(self, bodies: Sequence[bytes]) -> list[FakeResult]:
        for body in bodies:
            if body in self.failures:
                raise self.failures[body]
        return [self.put(body) for body in bodies]

    def submit(self, body: bytes) -> FakeFuture:
        return FakeFuture(self.failures[body] if body in self.failures else self.put(body))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def read(self, first_index: int, **options: object) -> list[Entry]:
        self.calls.append(("read", first_index, options))
        count = options.get("count")
        assert isinstance(count, int)
        return self.entries[first_index : first_index + min(count, 2)]  # A server may send less than was asked for.

    def follow(self, first_index: int) -> Iterator[Entry]:
        yield from self.entries[first_index:]
        raise KeyboardInterrupt

    def metadata(self, address: str | None = None) -> NodeStatus:
        return status_of("n0", end=len(self.entries) - 1)

    def members_status(self) -> dict[NodeId, NodeStatus | DLedgerError]:
        return self.members or {NodeId("n0"): status_of("n0", role=Role.LEADER, end=len(self.entries) - 1)}

    def transfer_leadership(self, target: NodeId | None) -> LeaderHint:
        self.calls.append(("transfer", target))
        if isinstance(self.transfer, DLedgerError):
            raise self.transfer
        return self.transfer

    def close(self) -> None:
        self.closed = True


def status_of(node: str, *, role: Role = Role.FOLLOWER, end: int = 9, **others: object) -> NodeStatus:
    """A member of a three-node group that has seen it all."""
    values: dict[str, object] = {
        "cluster_id": "c",
        "group": "default",
        "node_id": NodeId(node),
        "role": role,
        "term": Term(3),
        "leader": None,
        "members": tuple(MemberStatus(NodeId(f"n{n}"), f"p{n}:1", f"c{n}:2") for n in range(3)),
        "begin_index": LogIndex(0),
        "end_index": LogIndex(end),
        "committed_index": LogIndex(end),
        "flushed_index": LogIndex(end),
        "begin_position": Position(0),
        "end_position": Position(1000),
        "flush_mode": "sync",
        "disk_full": False,
        "voter": True,
        "pending_entries": 0,
    }
    return NodeStatus(**(values | others))  # type: ignore[arg-type] # the values are the fields', one by one


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """What the commands connect to."""
    fake = FakeClient()

    def connect(_target: targets.GroupTarget, *, enable_idempotence: bool = True) -> FakeClient:
        fake.numbers = enable_idempotence
        return fake

    monkeypatch.setattr(targets.GroupTarget, "client", connect)
    return fake


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run ``dledger`` with these words."""

    def invoke(*words: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(cli.main, list(words), input=stdin, prog_name="dledger")

    return invoke


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands believe that a person looks."""
    monkeypatch.setattr("dledger_cli.terminal.on_terminal", lambda: True)


# --- help and usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_with_examples(run: Callable[..., Result], name: str) -> None:
    """``--help`` shows how the command is used."""
    shown = run(name, "--help")

    assert shown.exit_code == 0
    assert "Examples:" in shown.output
    assert f"dledger {name}" in shown.output


@pytest.mark.parametrize("word", sorted(cli.ELSEWHERE))
def test_other_tools_words_lead_to_ours(run: Callable[..., Result], word: str) -> None:
    """``put``, as etcd says: the command that does it is named, and exists."""
    shown = run(word, "x")
    ours = re.search(r"see `dledger ([a-z]+)", shown.stderr)

    assert shown.exit_code == 2
    assert ours is not None
    assert ours[1] in cli.COMMANDS
    assert word not in cli.COMMANDS


@pytest.mark.parametrize("bootstrap", ["", "host", "host:", "host:99999", "host:1,,:2"])
def test_a_bad_bootstrap_address_is_a_usage_error(run: Callable[..., Result], bootstrap: str) -> None:
    """Exit code 2 and an example of a good one."""
    shown = run("status", "-b", bootstrap)

    assert shown.exit_code == 2
    assert "HOST:PORT" in shown.output


def test_a_wrong_group_is_told_with_the_option_to_choose_another(run: Callable[..., Result]) -> None:
    """The node names its own group; which option takes it, only the command knows."""
    with fake_group(1) as group:
        shown = run("status", "-b", group.addresses[0], "-g", "other")

    assert shown.exit_code == 1
    assert shown.output == "error: this node serves group 'default', not 'other': choose the group with --group\n"


def test_the_bootstrap_reaches_the_client(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]) -> None:
    """From the flag or from DLEDGER_BOOTSTRAP."""
    seen: list[targets.GroupTarget] = []

    def connect(target: targets.GroupTarget, **_options: bool) -> FakeClient:
        seen.append(target)
        return FakeClient()

    monkeypatch.setattr(targets.GroupTarget, "client", connect)
    monkeypatch.setenv("DLEDGER_BOOTSTRAP", "a:1, b:2")
    run("append", "x")
    run("append", "x", "-b", "c:3", "-g", "orders", "--timeout", "2")

    assert seen == [
        targets.GroupTarget(("a:1", "b:2"), "default", 5.0),
        targets.GroupTarget(("c:3",), "orders", 2.0),
    ]


# --- append ----------------------------------------------------------------------------------------------------------


def test_append_prints_the_index_of_each_argument(client: FakeClient, run: Callable[..., Result]) -> None:
    """Plain figures for pipes; the client is closed."""
    shown = run("append", "hello", "wörld")

    assert (shown.exit_code, shown.output) == (0, "0\n1\n")
    assert [entry.body for entry in client.entries] == [b"hello", "wörld".encode()]
    assert client.closed


def test_append_speaks_json_and_to_people(
    client: FakeClient, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--json`` gives an object per entry; a terminal gets a sentence."""
    as_json = run("append", "--json", "hello").output
    on_terminal(monkeypatch)
    sentence = run("append", "hello").output

    assert json.loads(as_json) == {"index": 0, "term": 1, "position": 0}
    assert sentence == "appended at index 1 (term 1, position 53)\n"


def test_append_takes_the_lines_of_standard_input(client: FakeClient, run: Callable[..., Result]) -> None:
    """One entry per line, line ends removed, empty lines kept."""
    shown = run("append", "-", stdin=b"one\ntwo\r\n\n\xff")

    assert shown.exit_code == 0
    assert [entry.body for entry in client.entries] == [b"one", b"two", b"", b"\xff"]
    assert shown.output.startswith("appended 4 entries, index 0 to 3")


def test_append_takes_the_lines_of_a_file(client: FakeClient, run: Callable[..., Result], tmp_path: Path) -> None:
    """With ``--json`` every acknowledged entry is one line."""
    file = tmp_path / "lines"
    file.write_text("a\nb\n")

    shown = run("append", "--file", str(file), "--json")

    assert [json.loads(line)["index"] for line in shown.output.splitlines()] == [0, 1]


def test_append_takes_the_lines_of_a_named_pipe(client: FakeClient, run: Callable[..., Result], tmp_path: Path) -> None:
    """``--file <(zcat f.gz)``: it can be read once only, and nothing of it may be lost by counting."""
    with named_pipe(tmp_path, b"a\nb\nc\n") as pipe:
        shown = run("append", "--file", str(pipe))

    assert shown.exit_code == 0
    assert [entry.body for entry in client.entries] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (("hello", "world"), False),
        (("x" * 120_000,) * 8, False),
        (("x" * 120_000,) * 9, True),
        (("-",), True),
        (("--file", __file__), True),
    ],
)
def test_only_what_takes_several_requests_registers_as_a_producer(
    client: FakeClient, run: Callable[..., Result], words: tuple[str, ...], numbers: bool
) -> None:
    """A single request is all or nothing, and need not be told from a repetition; of several some may be stored."""
    assert run("append", *words, stdin=b"a\n").exit_code == 0
    assert client.numbers is numbers


@pytest.mark.parametrize("words", [(), ("--file", __file__, "x")])
def test_append_wants_exactly_one_source(
    client: FakeClient, run: Callable[..., Result], words: tuple[str, ...]
) -> None:
    """Texts, standard input or a file."""
    assert run("append", *words).exit_code == 2


@pytest.mark.parametrize(("error", "code"), [(DiskFullError("no room"), 1), (QuorumAckTimeoutError("late"), 3)])
def test_a_failed_append_says_whether_it_may_have_happened(
    client: FakeClient, run: Callable[..., Result], error: DLedgerError, code: int
) -> None:
    """Exit code 1: not appended; 3: unknown. No traceback."""
    client.failures = {b"bad": error}

    shown = run("append", "bad")

    assert shown.exit_code == code
    assert shown.stderr.startswith(f"error: {error}\n")
    assert ("may or may not" in shown.stderr) == (code == 3)


@pytest.mark.parametrize(("error", "code"), [(DiskFullError("no room"), 1), (QuorumAckTimeoutError("late"), 3)])
def test_a_failing_stream_stops_and_counts(
    client: FakeClient, run: Callable[..., Result], error: DLedgerError, code: int
) -> None:
    """What was acknowledged, what was not, what is unknown; later lines are not sent."""
    client.failures = {b"bad": error}

    shown = run("append", "-", stdin=b"one\nbad\ntwo\nthree\nfour\n")

    assert shown.exit_code == code
    assert "1 acknowledged" in shown.stderr
    assert ("1 with unknown outcome" in shown.stderr) == (code == 3)
    assert [entry.body for entry in client.entries] == [b"one"]


# --- get and tail ----------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(client: FakeClient) -> FakeClient:
    """A NOOP and four entries."""
    client.put(b"", Magic.NOOP)
    for body in (b"one", b"two", b"\xff\x1b[31m", b"vier"):
        client.put(body)
    return client


def test_get_prints_bodies_for_pipes(filled: FakeClient, run: Callable[..., Result]) -> None:
    """Raw bytes, one entry per line, several reads if the server sends less; the log's own do not count."""
    shown = run("get", "0", "--count", "3", "--mode", "committed")

    assert shown.exit_code == 0
    assert shown.stdout_bytes == b"one\ntwo\n\xff\x1b[31m\n"
    assert run("get", "1", "--count", "1").stdout == "one\n", "although more was read"


def test_tail_of_everything_counts_everything(filled: FakeClient, run: Callable[..., Result]) -> None:
    """With ``--all``, the log's own entries are among the last N; without, they are not."""
    filled.put(b"", Magic.NOOP)

    assert run("tail", "-n", "2", "--all").stdout == "vier\n(NOOP of term 1)\n"
    assert run("tail", "-n", "1").stdout == "vier\n"


def test_get_as_json_describes_entries(filled: FakeClient, run: Callable[..., Result]) -> None:
    """Bodies that are no text are given in base64; ``--all`` includes what the log appended itself."""
    shown = [json.loads(line) for line in run("get", "0", "--count", "4", "--json").output.splitlines()]
    everything = [json.loads(line) for line in run("get", "0", "--count", "2", "--json", "--all").output.splitlines()]

    assert [one["type"] for one in shown] == ["NORMAL"] * 4
    assert shown[0] == {"index": 1, "term": 1, "position": 48, "type": "NORMAL", "body": "one"}
    assert shown[2]["body_base64"] == "/xtbMzFt"
    assert everything == [
        {"index": 0, "term": 1, "position": 0, "type": "NOOP", "about": "NOOP of term 1", "body": ""},
        shown[0],
    ]


def test_get_explains_an_entry_of_the_log_s_own(filled: FakeClient, run: Callable[..., Result]) -> None:
    """A single index is what was asked for: nothing on standard output is no answer."""
    filled.put(encode_registration(Registration("p", 7)), Magic.NOOP)

    noop, registration = run("get", "0"), run("get", "5")
    as_json, everything = run("get", "5", "--json"), run("get", "0", "--all")

    assert (noop.exit_code, noop.stdout, noop.stderr) == (0, "", "entry 0 is the log's own: NOOP of term 1\n")
    assert registration.stderr == "entry 5 is the log's own: producer p from here on, slot 7\n"
    assert json.loads(as_json.stdout)["about"] == "producer p from here on, slot 7"
    assert everything.stdout == "(NOOP of term 1)\n"


def test_a_terminal_is_not_recoloured_by_an_entry(
    filled: FakeClient, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control characters are shown, not obeyed."""
    on_terminal(monkeypatch)

    shown = run("get", "0", "--count", "5", "--all").output

    assert "\x1b" not in shown
    assert "\\xff\\x1b[31m" in shown
    assert "         0    1  (NOOP of term 1)\n" in shown


@pytest.mark.parametrize(
    ("words", "mode"),
    [((), "LINEARIZABLE"), (("--node", "a:1"), "COMMITTED"), (("--mode", "local"), "LOCAL")],
)
def test_get_asks_the_leader_unless_told_otherwise(
    filled: FakeClient, run: Callable[..., Result], words: tuple[str, ...], mode: str
) -> None:
    """As etcd does: who has just appended reads it."""
    run("get", "1", *words)

    ((_, index, options),) = filled.calls
    assert index == 1
    assert isinstance(options, dict)
    assert options["mode"].name == mode


def test_tail_works_without_a_leader(filled: FakeClient, run: Callable[..., Result]) -> None:
    """What the members know to be committed is all there is."""
    filled.members = {NodeId("n0"): status_of("n0")}

    shown = run("tail", "-n", "1")

    assert (shown.exit_code, shown.stdout_bytes) == (0, b"vier\n")


def test_get_beyond_the_end_fails_and_says_where_the_end_is(filled: FakeClient, run: Callable[..., Result]) -> None:
    """What exists is printed, then exit code 1."""
    shown = run("get", "4", "--count", "3")

    assert shown.exit_code == 1
    assert shown.stdout_bytes == b"vier\n"
    assert "the log ends before index 5" in shown.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), b"one\ntwo\n\xff\x1b[31m\nvier\n"),
        (("-n", "1"), b"vier\n"),
        (("--from", "4"), b"vier\n"),
        (("--from", "9"), b""),
        (("-n", "1", "--from", "1"), b"one\n"),
        (("-n", "2", "--from", "2"), b"two\n\xff\x1b[31m\n"),
        (("-n", "0", "--from", "1"), b""),
        (("-n", "9", "--from", "3"), b"\xff\x1b[31m\nvier\n"),
        (("-n", "2", "--from", "0", "--all"), b"(NOOP of term 1)\none\n"),
        (("-f", "-n", "1"), b"vier\n"),
        (("-f", "--from", "3"), b"\xff\x1b[31m\nvier\n"),
        (("-f", "--from", "0"), b"one\ntwo\n\xff\x1b[31m\nvier\n"),
        (("-n", "5", "--all"), b"(NOOP of term 1)\none\ntwo\n\xff\x1b[31m\nvier\n"),
        (("-n", "4", "--all"), b"one\ntwo\n\xff\x1b[31m\nvier\n"),
        (("-f", "--from", "0", "--all"), b"(NOOP of term 1)\none\ntwo\n\xff\x1b[31m\nvier\n"),
    ],
)
def test_tail_prints_the_end(
    filled: FakeClient, run: Callable[..., Result], words: tuple[str, ...], expected: bytes
) -> None:
    """From the end or from an index; ``-f`` goes on until Ctrl-C."""
    shown = run("tail", *words)

    assert (shown.exit_code, shown.stdout_bytes) == (130 if "-f" in words else 0, expected)


def test_tail_refuses_a_number_of_entries_where_there_is_no_end(filled: FakeClient, run: Callable[..., Result]) -> None:
    """Of two options that contradict each other, none is ignored silently."""
    shown = run("tail", "-f", "-n", "1", "--from", "2")

    assert (shown.exit_code, shown.stdout_bytes) == (2, b"")
    assert "error: -f has no end" in shown.stderr


def test_one_entry_is_one_entry(client: FakeClient, run: Callable[..., Result]) -> None:
    """The command line speaks as people do; a carriage return before the line's end is no part of the entry."""
    shown = run("append", "-", stdin=b"one\r\n")

    assert shown.output.startswith("appended 1 entry, index ")
    assert " to " not in shown.output


# --- status and transfer ---------------------------------------------------------------------------------------------


@pytest.fixture
def group_of_three(client: FakeClient) -> FakeClient:
    """A leader, a follower that lags and complains, and a dead node."""
    client.members = {
        NodeId("n1"): status_of("n1", role=Role.LEADER, pending_entries=2),
        NodeId("n0"): status_of("n0", end=4, disk_full=True, voter=False, flush_mode="async"),
        NodeId("n2"): UnavailableError("c2:2 is unreachable: connection refused"),
    }
    return client


def test_status_is_a_plain_table_in_a_pipe(group_of_three: FakeClient, run: Callable[..., Result]) -> None:
    """Sorted by node, the lag counted from the leader's end, complaints in the notes."""
    shown = run("status")

    assert shown.exit_code == 0
    assert [line.split(maxsplit=9) for line in shown.output.splitlines()] == [
        ["node", "role", "term", "begin", "end", "committed", "flushed", "lag", "clients", "notes"],
        ["n0", "FOLLOWER", "3", "0", "4", "4", "4", "5", "c0:2", "DISK FULL, not voting yet, flush async"],
        ["n1", "LEADER", "3", "0", "9", "9", "9", "0", "c1:2", "2 pending"],
        ["n2", "unreachable", "c2:2", "connection", "refused"],
    ]


def test_status_says_what_is_the_matter_with_a_line_each(
    client: FakeClient, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the table, in a pipe and on a terminal; JSON has the fields."""
    damaged = Condition("damaged", "entry 7 is wrong", 0, "/data/0")
    client.members = {NodeId("n1"): status_of("n1", role=Role.LEADER, conditions=(damaged,))}
    said = r"n1: DAMAGED /data/0 since [\d-]+ [\d:]+: entry 7 is wrong"

    assert re.fullmatch(said, run("status").output.splitlines()[-1])
    told = json.loads(run("status", "--json").output)["nodes"][0]["conditions"]
    assert told == [{"kind": "damaged", "message": "entry 7 is wrong", "since_ms": 0, "subject": "/data/0"}]
    on_terminal(monkeypatch)
    assert re.search(said, run("status").output)


def test_status_is_a_rich_table_on_a_terminal(
    group_of_three: FakeClient, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cut in the 80 columns that a terminal has at least; notes stand below."""
    on_terminal(monkeypatch)

    shown = run("status").output

    assert "LEADER" in shown
    assert "unreachable" in shown
    assert "n0: DISK FULL, not voting yet, flush async\n" in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_status_keeps_within_the_terminals_width(
    group_of_three: FakeClient, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Columns that do not fit are named below; those that are shown are whole."""
    on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(width))

    table, _, rest = run("status").output.partition("n0: DISK FULL")

    assert max(len(line) for line in table.splitlines()) <= width
    assert "…" not in table
    assert all(word in table for word in ("node", "role", "end", "lag", "unreachable"))
    assert ("no room for: flushed" in rest) == (width < 70)


def test_status_as_json_holds_everything(group_of_three: FakeClient, run: Callable[..., Result]) -> None:
    """One document; unreachable nodes are in it."""
    document = json.loads(run("status", "--json").output)

    assert document["leader"] == "n1"
    assert [node["reachable"] for node in document["nodes"]] == [True, True, False]
    assert document["nodes"][1]["members"][0]["client_address"] == "c0:2"
    assert document["nodes"][2] == {
        "reachable": False,
        "node_id": "n2",
        "error": "c2:2 is unreachable: connection refused",
    }


def test_status_fails_without_a_leader_and_counts_only_the_newest_one(
    client: FakeClient, run: Callable[..., Result]
) -> None:
    """A leader of an old term that has not noticed yet is not the leader."""
    client.members = {NodeId("n0"): status_of("n0")}
    leaderless = run("status")
    client.members = {
        NodeId("n0"): status_of("n0", role=Role.LEADER, term=Term(2)),
        NodeId("n1"): status_of("n1", role=Role.LEADER, term=Term(3)),
    }
    two_leaders = run("status", "--json")

    assert leaderless.exit_code == 1
    assert "no leader" in leaderless.stderr
    assert json.loads(two_leaders.output)["leader"] == "n1"


def test_transfer_names_the_new_leader(client: FakeClient, run: Callable[..., Result]) -> None:
    """With and without a target."""
    shown = [run("transfer-leader"), run("transfer-leader", "n2")]

    assert [(one.exit_code, one.output) for one in shown] == [(0, "n1 leads now\n")] * 2
    assert client.calls == [("transfer", None), ("transfer", "n2")]


@pytest.mark.parametrize("error", [TransferFailedError("n1 did not take over"), LeaderNotReadyError("not yet")])
def test_a_failed_transfer_exits_with_1(client: FakeClient, run: Callable[..., Result], error: DLedgerError) -> None:
    """The error is a sentence."""
    client.transfer = error

    shown = run("transfer-leader")

    assert (shown.exit_code, shown.stderr) == (1, f"error: {error}\n")


# --- serve -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, bool]]:
    """The configurations that ``serve`` would have run."""
    seen: list[tuple[ServerConfig, bool]] = []

    def run_node(config: ServerConfig, *_: object, repair: bool, until_stdin_closes: bool) -> int:
        seen.append((config, repair))
        return 0

    monkeypatch.setattr(serve_module, "run_node", run_node)
    return seen


def test_serve_joins_flags_file_and_environment(
    served: list[tuple[ServerConfig, bool]],
    run: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named flags and ``--set`` win over variables, which win over the file."""
    conf = tmp_path / "n1.conf"
    conf.write_text("dLegerGroup=file\ndLegerSelfId=n1\nnamesrvAddr=x:1\n")
    monkeypatch.setenv("DLEDGER_MEMBERS", "n0-a:1;n1-b:2")
    words = [
        "-c",
        str(conf),
        "--insecure",
        "-g",
        "flag",
        "--flush",
        "async",
        "--client-port",
        "0",
        "-s",
        "/data",
        "--repair",
    ]

    shown = run("serve", *words, "--set", "segment_bytes=64k", "--set", "cluster_id=a=b")

    assert shown.exit_code == 0
    ((config, repair),) = served
    assert (config.group, config.node_id, config.client_port, repair) == ("flag", "n1", 0, True)
    assert (config.store.base_dir, config.store.flush_mode) == (Path("/data"), FlushMode.ASYNC)
    assert (config.store.segment_bytes, config.cluster_id) == (65536, "a=b")


def test_serve_names_all_wrong_settings_and_exits_with_2(
    served: list[tuple[ServerConfig, bool]], run: Callable[..., Result]
) -> None:
    """One line each, nothing is opened."""
    shown = run("serve", "-i", "n5", "--set", "segment_byte=1", "--client-port", "http")

    assert shown.exit_code == 2
    assert shown.stderr.splitlines() == [
        "error: flag segment_byte: unknown setting: did you mean segment_bytes?",
        "error: flag client_port: client_port: invalid whole number 'http'",
    ]
    assert served == []


@pytest.mark.parametrize("words", [("--set", "x"), ("--set", "=1"), ("-g", "a", "--set", "group=b")])
def test_serve_refuses_assignments_that_are_none(
    served: list[tuple[ServerConfig, bool]], run: Callable[..., Result], words: tuple[str, ...]
) -> None:
    """``--set`` wants NAME=VALUE, each name once."""
    assert run("serve", *words).exit_code == 2


# --- watching, progress, delegation ----------------------------------------------------------------------------------


@dataclass
class WatchedClient(FakeClient):
    """Answers twice; then the person has seen enough."""

    rounds: int = 2

    def members_status(self) -> dict[NodeId, NodeStatus | DLedgerError]:
        if self.rounds == 0:
            raise KeyboardInterrupt
        self.rounds -= 1
        return self.members


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_watching_repeats_until_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result], terminal: bool, words: tuple[str, ...]
) -> None:
    """Ctrl-C is the normal end, and a missing leader is no reason to stop looking."""
    client = WatchedClient(members={NodeId("n0"): status_of("n0")})
    monkeypatch.setattr(targets.GroupTarget, "client", lambda _target: client)
    monkeypatch.setattr("dledger_cli.terminal.on_terminal", lambda: terminal)

    shown = run("status", "--watch", "--interval", "0.1", *words)

    assert shown.exit_code == 130
    assert "FOLLOWER" in shown.output
    assert client.closed


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar on a terminal's standard error; elsewhere nothing."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    with terminal.progress("appending", 3) as advance:
        advance(1)
        advance(2)
    silent = written.getvalue()
    monkeypatch.setattr(written, "isatty", lambda: True)
    with terminal.progress("appending", 3) as advance:
        advance(3)

    assert silent == ""
    assert "appending" in written.getvalue()


def test_demo_passes_its_exit_code_on(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]) -> None:
    """And its options to the story."""
    seen: list[object] = []

    def run_demo(file: Path | None, *, keep: bool, console: bool) -> int:
        seen.append((file, keep, console))
        return 5

    monkeypatch.setattr(demo, "run", run_demo)

    assert run("demo", "--keep").exit_code == 5
    assert seen == [(None, True, False)]


def test_every_command_that_lists_speaks_json_too() -> None:
    """A command without ``--json`` runs something, changes something, or prints what is meant to be copied."""
    without = {
        path
        for command, path in _leaves(cli.main, "")
        if not any("--json" in parameter.opts for parameter in command.params)
    }

    servers = {"broker start", "console", "demo", "kv serve", "nameserver", "serve"}
    changes = {"consumer delete", "ha promote", "member force", "restore-vote", "transaction resume", "dlq resend"}
    changes |= {
        "consumer set",
        "kv del",
        "kv lock",
        "kv put",
        "message delayed cancel",
        "snapshot create",
        "topic create",
        "topic delete",
    }
    json_only = {"dlq export", "kv watch", "transaction export"}
    own_files = {
        "access new",
        "dlq export",
        "transaction export",
        "certs client",
        "certs init",
        "certs node",
        "certs renew",
        "completion",
        "deploy show",
        "snapshot verify",
    }
    assert without == json_only | servers | changes | own_files | {f"context {one}" for one in ("add", "remove", "use")}


def _leaves(command: click.Command, path: str) -> Iterator[tuple[click.Command, str]]:
    if not isinstance(command, click.Group):
        yield command, path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from _leaves(inner, f"{path} {name}".strip())
