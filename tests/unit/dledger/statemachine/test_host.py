"""A state machine on a real node: order, results, repetitions, queries, snapshots, retention, failures."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dledger.client import DLedgerClient
from dledger.clock import Clock
from dledger.config import Member, ServerConfig, SnapshotConfig, StoreConfig
from dledger.errors import (
    DamagedSnapshotError,
    DiskError,
    DLedgerError,
    FencedError,
    InvalidRequestError,
    LeaderNotReadyError,
    NoStateMachineError,
    PendingFullError,
    RequestTimeoutError,
    ResultForgottenError,
    ShutdownError,
    SnapshotFormatError,
    StateMachineError,
)
from dledger.monitoring import ConditionKind
from dledger.remoting.log_codec import LogCode, error_of
from dledger.rpc.clients import group_codec
from dledger.server import DLedgerServer
from dledger.statemachine.applier import RESULT_BYTES_MAX
from dledger.statemachine.commands import RESULTS_KEPT
from dledger.statemachine.host import QUERIES_MAX
from dledger.statemachine.ports import Applied, SnapshotWriter
from dledger.statemachine.snapshots import SnapshotBuilder, SnapshotStore
from dledger.store.fs import FileSystem
from dledger.types import AppendedBatch, LogIndex, ProducerBatch, QueryAnswer, SnapshotState
from dledger.values import MIB
from dledger_cli.local.group import free_ports
from tests.support.cluster import N0
from tests.support.counting import History, Saved
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until


def config_in(directory: Path, *, snapshots: SnapshotConfig | None = None, **changes: object) -> ServerConfig:
    """A group of one, with segments that hold about a hundred entries."""
    store = StoreConfig(directory, segment_bytes=1 << 16, index_segment_bytes=1 << 14)
    (port,) = free_ports(1)
    return ServerConfig(
        node_id=N0,
        members=(Member(N0, "127.0.0.1", port),),
        client_port=0,
        grpc_server_port=0,
        store=replace(store, **changes),  # type: ignore[arg-type]  # by name
        snapshots=snapshots or SnapshotConfig(),
    )


@contextmanager
def running(config: ServerConfig, machine: History | None, clock: Clock | None = None) -> Iterator[DLedgerServer]:
    server = DLedgerServer(config, state_machine=machine, clock=clock).start()
    try:
        wait_until(lambda: leads(server), "it leads")
        yield server
    finally:
        server.stop()


def ask(question: Callable[[Callable[[object], None]], None]) -> object:
    answer: Future[object] = Future()
    question(answer.set_result)
    return answer.result(60)


def leads(server: DLedgerServer) -> bool:
    return isinstance(ask(lambda done: server.submit_producer("anybody", done)), int)


def command(server: DLedgerServer, *bodies: bytes, producer: ProducerBatch | None = None) -> object:
    """The results, or the error."""
    if producer is not None:
        producer = replace(producer, count=len(bodies))
    return ask(lambda done: server.submit_commands(bodies, done, producer))


def query(server: DLedgerServer, request: bytes = b"") -> list[str]:
    answer = ask(lambda done: server.submit_query(request, done))
    assert isinstance(answer, QueryAnswer), answer
    found: list[str] = json.loads(answer.result)
    return found


def save(server: DLedgerServer) -> SnapshotState:
    state = ask(server.submit_snapshot)
    assert isinstance(state, SnapshotState), state
    return state


def store_of(config: ServerConfig) -> SnapshotStore:
    return SnapshotStore(FileSystem(), config.store.base_dir / f"dledger-{N0}")


def test_commands_are_applied_in_order_and_answered(tmp_path: Path) -> None:
    """S1, S3: each command once, its own result; appends without a result are applied as well."""
    machine = History()
    with running(config_in(tmp_path), machine) as server:
        assert command(server, b"a", b"b") == (b"1", b"2")
        appended = ask(lambda done: server.submit_append([b"c"], done))
        assert isinstance(appended, AppendedBatch)
        assert command(server, b"d") == (b"4",)

        assert query(server) == ["a", "b", "c", "d"]
    indexes = [one.index for one in machine.seen]
    assert indexes == sorted(set(indexes))
    assert [one.body for one in machine.seen] == [b"a", b"b", b"c", b"d"]


def test_everything_is_applied_again_after_a_start_without_snapshot(tmp_path: Path) -> None:
    """S1: from the first entry; the results are those of the first time."""
    config = config_in(tmp_path)
    with running(config, History()) as server:
        command(server, b"a", b"b")
    machine = History()
    with running(config, machine) as server:
        assert query(server) == ["a", "b"]
        assert command(server, b"c") == (b"3",)


def test_a_repeated_command_has_its_first_result(tmp_path: Path) -> None:
    """S4: it is neither appended nor applied again, also after a restart, with a snapshot and without."""
    config = config_in(tmp_path)
    with running(config, History()) as server:
        assert command(server, b"a", b"b", producer=ProducerBatch("p", 0)) == (b"1", b"2")
        command(server, b"x")
        assert command(server, b"a", b"b", producer=ProducerBatch("p", 0)) == (b"1", b"2")
        assert command(server, b"b", b"c", producer=ProducerBatch("p", 1)) == (b"2", b"4")
    machine = History()
    with running(config, machine) as server:
        assert command(server, b"a", b"b", b"c", producer=ProducerBatch("p", 0)) == (b"1", b"2", b"4")
        assert [(one.producer, one.sequence) for one in machine.seen] == [("p", 0), ("p", 1), ("", -1), ("p", 2)]
        save(server)
    with running(config, History()) as server:
        assert command(server, b"c", b"d", producer=ProducerBatch("p", 2)) == (b"4", b"5")
        assert query(server) == ["a", "b", "x", "c", "d"]


def test_a_result_that_is_not_kept_is_said_to_be_forgotten(tmp_path: Path) -> None:
    """S4: the last ones of each producer are kept; the command of an older one was applied, and is not again."""
    with running(config_in(tmp_path), History()) as server:
        for sequence in range(RESULTS_KEPT + 1):
            command(server, b"a", producer=ProducerBatch("p", sequence))
        forgotten = command(server, b"a", producer=ProducerBatch("p", 0))

        assert isinstance(forgotten, ResultForgottenError)
        assert command(server, b"a", producer=ProducerBatch("p", 1)) == (b"2",)
        assert len(query(server)) == RESULTS_KEPT + 1


def test_requests_of_too_many_commands_are_refused(tmp_path: Path) -> None:
    """A numbered one may have as many as results are kept, or its repetition could not be answered."""
    with running(config_in(tmp_path), History()) as server:
        for bodies, producer in (
            ((), None),
            ((b"",) * (RESULTS_KEPT + 1), ProducerBatch("p", 0)),
            ((b"",) * 1025, None),
        ):
            assert isinstance(command(server, *bodies, producer=producer), InvalidRequestError)
        assert query(server) == []


class Held(History):
    """Applies nothing before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        assert self.go.wait(60)
        return super().apply(entries)


def test_more_commands_than_may_wait_are_refused(tmp_path: Path) -> None:
    """Committed ones that are not applied yet count, too; after the results there is room again."""
    config, machine = config_in(tmp_path), Held()
    config = replace(config, replication=replace(config.replication, pending_entries_max=4))
    with running(config, machine) as server:
        answers: list[object] = []
        server.submit_commands([b"a", b"b", b"c"], answers.append)
        wait_until(lambda: server.status().pending_entries == 0, "they are committed")
        assert isinstance(command(server, b"d", b"e"), PendingFullError)
        assert answers == []
        machine.go.set()
        wait_until(lambda: bool(answers), "they are applied")

        assert answers == [(b"1", b"2", b"3")]
        assert command(server, b"d", b"e") == (b"4", b"5")


def test_a_node_without_machine_says_so_and_has_no_thread_of_one(tmp_path: Path) -> None:
    """No cost without a machine; the error says what to do."""
    config = config_in(tmp_path)
    with running(config, None) as server:
        for answer in (
            command(server, b"a"),
            ask(lambda done: server.submit_query(b"", done)),
            ask(server.submit_snapshot),
        ):
            assert isinstance(answer, NoStateMachineError)
    assert not (tmp_path / f"dledger-{N0}" / "snapshots").exists()


def test_a_failing_command_stops_the_node_with_its_index(tmp_path: Path) -> None:
    """S2: skipping it would make the members differ; the waiting command's outcome is unknown."""
    server = DLedgerServer(config_in(tmp_path), state_machine=History()).start()
    try:
        wait_until(lambda: leads(server), "it leads")
        command(server, b"a")
        answers: list[object] = []
        server.submit_commands([b"fail"], answers.append)
        assert server.wait(60) == 70
        assert isinstance(server.fatal, StateMachineError)
        assert "in entries " in str(server.fatal)
    finally:
        server.stop()
    assert [type(one) for one in answers] == [ShutdownError]


def test_an_answer_that_fits_no_frame_is_refused_with_its_size(tmp_path: Path) -> None:
    """A query may answer anything; results of up to 1 MiB may be too many together, and are of applied commands."""

    class Large(History):
        def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
            super().apply(entries)
            return [bytes(RESULT_BYTES_MAX)] * len(entries)

        def query(self, request: bytes) -> bytes:
            return bytes(int(request))

    with running(config_in(tmp_path), Large()) as server, DLedgerClient(server.client_address, timeout_s=60) as client:
        assert len(client.query(b"%d" % (8 * MIB)).result) == 8 * MIB
        with pytest.raises(InvalidRequestError, match="ask for less at a time"):
            client.query(b"%d" % (16 * MIB))
        assert len(client.command(b"a")) == RESULT_BYTES_MAX
        with RemotingSocket(int(server.client_address.rpartition(":")[2])) as socket:
            commands = group_codec.encode_commands(group_codec.Commands("", [b"b"] * 16))
            refused = error_of(socket.ask(LogCode.COMMAND, body=commands), "n0")
        assert isinstance(refused, InvalidRequestError)
        assert refused.outcome == "unknown"


def test_a_failing_query_is_its_callers_alone(tmp_path: Path) -> None:
    """It changed nothing: a malformed request must not stop a node."""
    with running(config_in(tmp_path), History()) as server:
        answer = ask(lambda done: server.submit_query(b"fail", done))
        assert isinstance(answer, StateMachineError)
        assert answer.outcome == "not_applied"
        assert command(server, b"a") == (b"1",)


class Hanging(History):
    """Answers no query until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def query(self, request: bytes) -> bytes:
        self.asked.set()
        assert self.answers.wait(60)
        return super().query(request)


def test_a_query_that_does_not_end_does_not_keep_a_node_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop waits for a while, and counts as a failure then: the process must not wait for its threads."""
    monkeypatch.setattr("dledger.statemachine.host.JOIN_TIMEOUT_S", 0.1)
    machine = Hanging()
    with running(config_in(tmp_path), machine) as server:
        assert command(server, b"a") == (b"1",)
        server.submit_query(b"", lambda _answer: None)
        assert machine.asked.wait(60)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        stopping.join(30)
        is_over = not stopping.is_alive()
        machine.answers.set()
        stopping.join(30)

        assert is_over
        assert isinstance(server.fatal, StateMachineError)
        assert "query" in str(server.fatal)


def test_a_stop_waits_for_queries_in_progress(tmp_path: Path) -> None:
    """And nothing has failed then."""
    machine, answers = Hanging(), list[object]()
    with running(config_in(tmp_path), machine) as server:
        server.submit_query(b"", answers.append)
        assert machine.asked.wait(60)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        machine.answers.set()
        stopping.join(30)

        assert [type(one) for one in answers] == [QueryAnswer]
        assert server.fatal is None


def test_a_node_that_has_stopped_lets_nobody_wait(tmp_path: Path) -> None:
    """N1: its process may go on with other groups, and the port that its clients ask."""
    with running(config_in(tmp_path), History()) as server:
        command(server, b"a")
    questions: list[Callable[[Callable[[object], None]], None]] = [
        lambda done: server.submit_query(b"", done, linearizable=False, after=LogIndex(1 << 40), wait_ms=50),
        lambda done: server.submit_query(b"", done, linearizable=False),
        lambda done: server.submit_query(b"", done),
        lambda done: server.submit_commands([b"b"], done),
        server.submit_snapshot,
    ]
    assert all(isinstance(ask(question), DLedgerError) for question in questions)


def test_a_linearizable_query_is_never_asked_too_early(tmp_path: Path) -> None:
    """S5: if the entry is not applied in time, there is no answer; and that leaves no room less for others."""
    config = config_in(tmp_path)
    config = replace(config, replication=replace(config.replication, pending_entries_max=1))
    with running(config, History()) as server:
        host = server._machine
        assert host is not None
        far = LogIndex(1 << 40)
        early = ask(lambda done: host.query(b"", far, 20, done, even_if_late=False))
        assert isinstance(early, LeaderNotReadyError)
        answers: list[object] = []
        host.query(b"", far, 60_000, answers.append, even_if_late=True)
        for _ in range(QUERIES_MAX):
            full = ask(lambda done: host.query(b"", far, 60_000, done, even_if_late=True))
            assert isinstance(full, PendingFullError)
        assert query(server) == []
        assert answers == []
    assert [type(one) for one in answers] == [ShutdownError]


def test_a_node_that_stops_saves_what_it_has_applied(tmp_path: Path) -> None:
    """S6: if that is worth it; its next start is short."""
    config = config_in(tmp_path, snapshots=SnapshotConfig(snapshot_entries=1000))
    for count, is_saved in ((2, False), (20, True)):
        with running(config, History()) as server:
            command(server, *[b"a"] * count)
        assert (store_of(config).newest is not None) == is_saved


def test_a_snapshot_is_not_due_before_as_much_log_as_the_last_one_has(tmp_path: Path) -> None:
    """S6: a large state is not written again for each little change."""
    config = config_in(tmp_path, snapshots=SnapshotConfig(snapshot_bytes=1000, snapshot_entries=100_000))
    with running(config, History()) as server:
        host = server._machine
        assert host is not None
        command(server, *[b"x" * 1000] * 30)
        wait_until(lambda: host.snapshot_bytes > 30_000, "the first one is written")
        first = host.snapshot_index
        command(server, *[b"x" * 1000] * 10)
        assert not host._is_due()
        assert host.snapshot_index == first
        command(server, *[b"x" * 1000] * 30)
        wait_until(lambda: host.snapshot_index > first, "the second one is written")


def test_a_local_query_waits_for_what_comes_next(tmp_path: Path) -> None:
    """For watches: the answer comes with the next entry after the one named, or when the time is up."""
    with running(config_in(tmp_path), History()) as server:
        first = ask(lambda done: server.submit_query(b"", done, linearizable=False))
        assert isinstance(first, QueryAnswer)
        answers: list[object] = []
        after = server.log.committed_index
        server.submit_query(b"", answers.append, linearizable=False, after=after, wait_ms=20_000)
        assert answers == []
        command(server, b"a")
        wait_until(lambda: bool(answers), "the watch is answered")
        assert isinstance(answers[0], QueryAnswer)
        assert answers[0].applied_index > after

        late = ask(lambda done: server.submit_query(b"", done, linearizable=False, after=LogIndex(1 << 40), wait_ms=1))
        assert isinstance(late, QueryAnswer)


class SteppedClock(Clock):
    """Its time passes faster, if a test lets it."""

    def __init__(self) -> None:
        self.passed_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.passed_ms


class SetClock(Clock):
    """Its wall time is set by the test."""

    def __init__(self) -> None:
        self.wall = 1_000_000

    def wall_ms(self) -> int:
        return self.wall


def test_the_time_of_entries_is_the_logs_and_never_goes_back(tmp_path: Path) -> None:
    """S2: no clock: the second life sees the times of the first."""
    config, clock, machine = config_in(tmp_path), SetClock(), History()
    with running(config, machine, clock) as server:
        for wall in (1_000_000, 1_000_050, 1_000_100, 900_000, 2_000_000):
            clock.wall = wall
            command(server, str(wall).encode())
    times = [one.time_ms for one in machine.seen]
    assert times == [1_000_000, 1_000_000, 1_000_100, 1_000_100, 2_000_000]

    again = History()
    with running(config, again, SetClock()) as server:
        command(server, b"x")
    assert [one.time_ms for one in again.seen] == [*times, 2_000_000]


def test_a_snapshot_is_written_after_so_many_entries_and_started_from(tmp_path: Path) -> None:
    """S6: what it includes is not applied again; of all snapshots, two are kept."""
    config = config_in(tmp_path, snapshots=SnapshotConfig(snapshot_entries=20))
    with running(config, History()) as server:
        machine = server._machine
        assert machine is not None
        for number in range(100):
            command(server, str(number).encode())
            wait_until(lambda: not machine._creation.is_busy, "no snapshot is being written")
        assert machine.snapshot_index >= 80
    assert len(store_of(config).snapshots) == 2
    again = History()
    with running(config, again) as server:
        assert query(server) == [str(number) for number in range(100)]
        assert len(again.seen) < 20
        assert save(server).index == server.log.committed_index


def test_a_damaged_snapshot_gives_way_to_the_previous_one(tmp_path: Path) -> None:
    """S6: then the log from there."""
    config = config_in(tmp_path)
    with running(config, History()) as server:
        command(server, b"a")
        save(server)
        command(server, b"b")
        newest = save(server)
    (store_of(config).directory / f"{newest.index:020d}" / "state").write_bytes(b"[]")

    again = History()
    with running(config, again) as server:
        assert query(server) == ["a", "b"]
        assert [one.body for one in again.seen] == [b"b"]


def test_a_snapshot_of_a_later_format_is_refused(tmp_path: Path) -> None:
    """S12: the error says what to do, and nothing is moved aside."""

    class Later(History):
        format = 2

    config = config_in(tmp_path)
    with running(config, Later()) as server:
        command(server, b"a")
        save(server)
    with pytest.raises(SnapshotFormatError, match="run the version that wrote it"):
        DLedgerServer(config, state_machine=History())
    with running(config, Later()) as server:
        assert query(server) == ["a"]


def test_a_log_that_ends_before_the_snapshot_goes_on_after_it(tmp_path: Path) -> None:
    """S8: a crash between the snapshot's rename and the log's reset; producers included."""
    config, other = config_in(tmp_path / "one"), config_in(tmp_path / "two")
    with running(config, History()) as server:
        command(server, b"a", producer=ProducerBatch("p", 0))
        save(server)
    with running(other, History()) as server:
        pass
    snapshots = Path(f"dledger-{N0}") / "snapshots"
    (tmp_path / "one" / snapshots).rename(tmp_path / "two" / snapshots)

    machine = History()
    with running(other, machine) as server:
        assert server.status().begin_index == store_of(other).newest_index + 1
        assert command(server, b"a", producer=ProducerBatch("p", 0)) == (b"1",)
        assert command(server, b"b", producer=ProducerBatch("p", 1)) == (b"2",)
        assert query(server) == ["a", "b"]


def test_damage_at_the_snapshots_last_entry_does_not_keep_a_node_from_starting(tmp_path: Path) -> None:
    """Its repair from other members needs a node that runs."""
    config = config_in(tmp_path, recovery_verify_bytes=0)
    with running(config, History()) as server:
        for number in range(10):
            command(server, str(number).encode())
        end, index = server.log.mark_at(save(server).index).position, save(server).index
        begin = server.log.mark_at(LogIndex(index - 1)).position
        for number in range(10, 1500):
            command(server, str(number).encode())
    segments = sorted((tmp_path / f"dledger-{N0}" / "data").iterdir())
    assert len(segments) > 1
    with segments[0].open("r+b") as file:
        file.seek(begin)
        file.write(bytes(byte ^ 0xFF for byte in os.pread(file.fileno(), end - begin, begin)))
    store = store_of(config)
    for meta in store.snapshots[:-1]:
        store.set_aside(meta, "the newest one is to be that of the damaged entry")

    machine = History()
    server = DLedgerServer(config, state_machine=machine)
    try:
        assert server._machine is not None
        assert server._machine.applied_index == index
        assert server.log.last.index > 1500, "nothing is given up of the entries after it"
    finally:
        server.stop()


def test_a_snapshot_of_another_history_is_refused(tmp_path: Path) -> None:
    """Nothing unverified is served: the chain CRC tells that the entry is another one."""
    config, other = config_in(tmp_path / "one"), config_in(tmp_path / "two")
    for one, body in ((config, b"a"), (other, b"b")):
        with running(one, History(), SetClock()) as server:
            command(server, body)
            command(server, body)
            save(server)
    snapshots = Path(f"dledger-{N0}") / "snapshots"
    (tmp_path / "two" / snapshots).rename(tmp_path / "gone")
    (tmp_path / "one" / snapshots).rename(tmp_path / "two" / snapshots)

    with pytest.raises(DamagedSnapshotError, match="--repair"):
        DLedgerServer(other, state_machine=History())


def test_retention_waits_for_a_snapshot_and_asks_for_one(tmp_path: Path) -> None:
    """S7: expired entries go once a snapshot includes them, and only those; the state survives a start without them."""
    config = config_in(
        tmp_path, retention_hours=0, delete_hour=tuple(range(24)), clean_interval_ms=20, follower_keep_bytes=0
    )
    with running(config, History()) as server:
        for number in range(12):
            command(server, *[f"{number}-{one}".encode() + b"x" * 1000 for one in range(30)])
        wait_until(lambda: server.status().begin_index > 100, "entries are gone")
        machine = server._machine
        assert machine is not None
        assert server.log.begin.index <= machine.snapshot_index
    again = History()
    with running(config, again) as server:
        assert len(query(server)) == 360


def test_nothing_expires_while_no_snapshot_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S7: and the condition says why nothing goes."""
    config = config_in(
        tmp_path, retention_hours=0, delete_hour=tuple(range(24)), clean_interval_ms=20, follower_keep_bytes=0
    )
    monkeypatch.setattr("dledger.statemachine.host._OVERDUE_MS", 50)

    def full(_self: SnapshotStore, _index: LogIndex) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(SnapshotStore, "build", full)
    with running(config, History()) as server:
        for _ in range(12):
            command(server, *[b"x" * 1000] * 30)
        kinds = {ConditionKind.SNAPSHOT_OVERDUE, ConditionKind.SNAPSHOT_FAILED}
        wait_until(lambda: kinds <= {one.kind for one in server.conditions.now()}, "both conditions are told")
        assert server.status().begin_index == 0


def test_a_failed_snapshot_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6, S7: though nothing is appended meanwhile; a person who asks need not wait for the next attempt."""
    config, machine = config_in(tmp_path, snapshots=SnapshotConfig(snapshot_entries=10)), History()
    build, full = SnapshotStore.build, threading.Event()
    failed = ConditionKind.SNAPSHOT_FAILED

    def failing(store: SnapshotStore, index: LogIndex) -> SnapshotBuilder:
        if full.is_set():
            raise OSError(28, "no space left")
        return build(store, index)

    monkeypatch.setattr(SnapshotStore, "build", failing)
    full.set()
    with running(config, machine) as server:
        host = server._machine
        assert host is not None
        command(server, *[b"a"] * 20)
        wait_until(lambda: server.conditions.holds(failed), "it has failed")
        assert isinstance(ask(server.submit_snapshot), DiskError)
        full.clear()
        assert save(server).index == host.applied_index

        full.set()
        monkeypatch.setattr("dledger.statemachine.applier.RETRY_MS", 200)
        command(server, *[b"a"] * 20)
        wait_until(lambda: server.conditions.holds(failed), "it has failed again")
        full.clear()
        wait_until(lambda: host.snapshot_index == host.applied_index, "it was written")
        wait_until(lambda: not server.conditions.holds(failed), "that is told no longer")


class HeldWrite(History):
    """Its snapshots are not written before they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.writing = threading.Event(), threading.Event()

    def save(self) -> Saved:
        machine, saved = self, super().save()

        class Held(Saved):
            def write(self, writer: SnapshotWriter) -> None:
                machine.writing.set()
                assert machine.go.wait(60)
                saved.write(writer)

        return Held(b"")


def test_a_fenced_node_tells_nothing_and_lets_nobody_wait(tmp_path: Path) -> None:
    """S11: its state may be of another history, and nothing is applied or written before somebody looks after it."""
    machine = HeldWrite()
    with running(config_in(tmp_path), machine) as server:
        command(server, b"a")
        asked: Future[object] = Future()
        server.submit_snapshot(lambda _done: None)
        wait_until(machine.writing.is_set, "a snapshot is being written")
        server.submit_snapshot(asked.set_result)
        server._fence("as if its history differed")
        assert isinstance(asked.result(60), FencedError)
        assert isinstance(ask(server.submit_snapshot), FencedError)
        assert isinstance(ask(lambda done: server.submit_query(b"", done, linearizable=False)), FencedError)
        machine.go.set()


def test_a_snapshot_on_demand_includes_what_was_applied_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: one that was begun before does not; and of those who wait, there is a bound."""
    monkeypatch.setattr("dledger.statemachine.host.SNAPSHOT_REQUESTS_MAX", 2)
    machine = HeldWrite()
    with running(config_in(tmp_path), machine) as server:
        command(server, b"a")
        answers: list[object] = []
        server.submit_snapshot(answers.append)
        assert machine.writing.wait(60)
        command(server, b"b")
        wanted = server.log.committed_index
        server.submit_snapshot(answers.append)
        assert isinstance(ask(server.submit_snapshot), PendingFullError)
        machine.go.set()
        wait_until(lambda: len(answers) == 2, "both are answered")

    first, second = answers
    assert isinstance(first, SnapshotState)
    assert isinstance(second, SnapshotState)
    assert first.index < wanted <= second.index


def test_an_older_snapshot_that_is_adopted_is_not_taken_for_what_is_applied(tmp_path: Path) -> None:
    """S8: who is elected counts producers from the snapshot on, and would count the entries between twice."""
    with running(config_in(tmp_path), History()) as server:
        command(server, b"a", producer=ProducerBatch("p", 0))
        save(server)
        machine = server._machine
        assert machine is not None
        meta = machine.snapshots.newest
        assert meta is not None
        saved = machine.producers
        command(server, b"b", producer=ProducerBatch("p", 1))
        assert isinstance(ask(partial(machine.adopt, meta)), bool)

        assert machine.producers == saved
        assert machine.applier.at.index > meta.index


def test_what_is_applied_while_a_snapshot_is_written_counts_for_the_next_one(tmp_path: Path) -> None:
    """S6: or a start would apply far more than ``snapshot_entries`` again; large states take minutes to write."""
    machine = HeldWrite()
    with running(config_in(tmp_path, snapshots=SnapshotConfig(snapshot_entries=20)), machine) as server:
        host = server._machine
        assert host is not None
        command(server, *[b"a"] * 20)
        assert machine.writing.wait(60)
        command(server, *[b"b"] * 15)
        machine.go.set()
        wait_until(lambda: not host._creation.is_busy, "the first one is written")
        first = host.snapshot_index
        command(server, *[b"c"] * 10)
        wait_until(lambda: host.snapshot_index >= first + 20, "the second one is written")


def test_retention_asks_again_if_the_snapshot_does_not_reach_far_enough(tmp_path: Path) -> None:
    """S7: more has expired meanwhile; that is not overdue."""
    clock = SteppedClock()
    with running(config_in(tmp_path), History(), clock) as server:
        host = server._machine
        assert host is not None
        for _ in range(3):
            command(server, b"a")
            host.last_removable(wanted := host.applied_index)
            wait_until(lambda wanted=wanted: host.snapshot_index >= wanted, "it is written")  # type: ignore[misc]
            clock.passed_ms += 61_000
        assert ConditionKind.SNAPSHOT_OVERDUE not in {one.kind for one in server.conditions.now()}


def test_a_log_of_another_history_is_not_given_up_for_a_snapshot(tmp_path: Path) -> None:
    """Committed entries stay: a directory of another group's snapshots is the mistake of a person."""
    config, other = config_in(tmp_path / "one"), config_in(tmp_path / "two")
    for one, starts in ((config, 3), (other, 1)):
        for _ in range(starts):  # each has a term
            with running(one, History()) as server:
                command(server, b"a")
        with running(one, History()) as server:
            command(server, *[b"b"] * 20)
            save(server)
    snapshots = Path(f"dledger-{N0}") / "snapshots"
    (tmp_path / "two" / snapshots).rename(tmp_path / "gone")
    (tmp_path / "one" / snapshots).rename(tmp_path / "two" / snapshots)
    with running(other, None) as server:
        for _ in range(20):
            ask(lambda done: server.submit_append([b"c"], done))

    with pytest.raises(DamagedSnapshotError, match="--repair"):
        DLedgerServer(other, state_machine=History())


@pytest.mark.parametrize("method", ["save", "write"])
def test_a_machine_that_cannot_be_saved_stops_the_node(tmp_path: Path, method: str) -> None:
    """S2: the error says which entry's snapshot it was; who asked for it is told that there is none."""

    class Failing(History):
        def save(self) -> Saved:
            if method == "save":
                raise ValueError("it was told to")

            class Unwritable(Saved):
                def write(self, writer: SnapshotWriter) -> None:
                    raise ValueError("it was told to")

            return Unwritable(b"")

    server = DLedgerServer(config_in(tmp_path), state_machine=Failing()).start()
    answers: list[object] = []
    try:
        wait_until(lambda: leads(server), "it leads")
        command(server, b"a")
        server.submit_snapshot(answers.append)
        assert server.wait(60) == 70
        assert isinstance(server.fatal, StateMachineError)
        assert "snapshot of entry " in str(server.fatal)
    finally:
        server.stop()
    assert [type(one) for one in answers] == [RequestTimeoutError]


def test_repair_sets_the_snapshots_aside_with_the_log(tmp_path: Path) -> None:
    """They are of the history that is given up."""
    config = config_in(tmp_path)
    with running(config, History()) as server:
        command(server, b"a")
        save(server)
    directory = tmp_path / f"dledger-{N0}"
    with (directory / "checkpoint").open("r+b") as file:
        file.write(bytes(4096 * 3))
    server = DLedgerServer(config, state_machine=History(), repair=True)
    server.stop()
    assert store_of(config).newest is None
    assert (directory / "damaged-1" / "snapshots").is_dir()
