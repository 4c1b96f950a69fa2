"""Producers of a real node: known after a restart, also when their entries have expired."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from dledger.config import Member, ServerConfig, StoreConfig
from dledger.core.ports import PreparedAppend
from dledger.errors import DLedgerError
from dledger.server import DLedgerServer
from dledger.types import AppendedBatch, ProducerBatch, Term
from dledger_cli.local.group import free_ports
from tests.support.cluster import N0
from tests.support.waiting import wait_until

SEGMENT_BYTES = 1 << 16


def config_in(directory: Path, **changes: object) -> ServerConfig:
    """A group of one, with segments that hold about a hundred entries."""
    store = StoreConfig(directory, segment_bytes=SEGMENT_BYTES, index_segment_bytes=1 << 14)
    (port,) = free_ports(1)
    return ServerConfig(
        node_id=N0,
        members=(Member(N0, "127.0.0.1", port),),
        client_port=0,
        store=replace(store, **changes),  # type: ignore[arg-type]  # by name
    )


def ask(question: Callable[[Callable[[object], None]], None]) -> object:
    """Submit something to the node and wait for the answer."""
    answer: Future[object] = Future()
    question(answer.set_result)
    return answer.result(60)


def append(server: DLedgerServer, *bodies: bytes, producer: ProducerBatch | None = None) -> AppendedBatch:
    result = ask(lambda done: server.submit_append(bodies, done, producer))
    assert isinstance(result, AppendedBatch), result
    return result


def sequence(server: DLedgerServer, name: str) -> object:
    return ask(lambda done: server.submit_producer(name, done))


def leads(server: DLedgerServer) -> bool:
    return server.status().pending_entries == 0 and isinstance(sequence(server, "anybody"), int)


def test_a_producer_outlives_its_entries_and_the_process(tmp_path: Path) -> None:
    """Retention removes what it appended, and only after that is written down anew."""
    expiring = config_in(
        tmp_path, retention_hours=0, delete_hour=tuple(range(24)), clean_interval_ms=20, follower_keep_bytes=0
    )
    with_producer = ProducerBatch("job", 0)
    server = DLedgerServer(expiring).start()
    try:
        wait_until(lambda: leads(server), "it leads")
        first = append(server, b"a", b"b", producer=with_producer)
        for _ in range(10):
            append(server, *[bytes(1000)] * 30)
        wait_until(lambda: server.status().begin_index > first.last_index, "the entries of the producer are gone")
    finally:
        server.stop()

    again = DLedgerServer(expiring).start()
    try:
        wait_until(lambda: leads(again), "it leads again")
        repeated = append(again, b"a", b"b", producer=with_producer)

        assert sequence(again, "job") == 2
        assert repeated.positions == ()
        assert sum(run.count for run in repeated.duplicates) == 2
        assert [run.positions for run in repeated.duplicates] == [()]
        assert again.measure().producers == 1
        assert again.measure().repeated_entries == 2
    finally:
        again.stop()


class Prepared(PreparedAppend):
    """Two entries whose bodies are made under the lock."""

    def bodies(self, _term: Term, stored: int = 0) -> list[bytes]:
        return [b"a", b"b"][stored:]

    def placed(self, _batch: AppendedBatch | None) -> None:
        pass


def test_a_prepared_batch_is_stored_once_however_often_it_is_sent(tmp_path: Path) -> None:
    """A broker's messages are numbered like a client's entries: a repetition is recognized."""
    batch = ProducerBatch("job", 0, count=2)
    server = DLedgerServer(config_in(tmp_path)).start()
    try:
        wait_until(lambda: leads(server), "it leads")
        first, again = (ask(lambda done: server.submit_prepared(Prepared(), done, batch)) for _ in range(2))

        assert isinstance(first, AppendedBatch)
        assert isinstance(again, AppendedBatch)
        assert (len(first.positions), first.duplicates) == (2, ())
        assert (again.positions, sum(run.count for run in again.duplicates)) == ((), 2)
        assert sequence(server, "job") == 2
    finally:
        server.stop()


def test_refusals_are_told(tmp_path: Path) -> None:
    """With their own errors; nothing is stored."""
    server = DLedgerServer(config_in(tmp_path)).start()
    try:
        wait_until(lambda: leads(server), "it leads")
        results = [
            ask(lambda done, batch=batch: server.submit_append([b"x"], done, batch))  # type: ignore[misc]  # a default
            for batch in (ProducerBatch("new", 3), ProducerBatch("not a name", 0))
        ]
        wrong_name = sequence(server, "not a name")
    finally:
        server.stop()

    assert all(isinstance(result, DLedgerError) for result in (*results, wrong_name))
