"""Numbered batches in both commit logs: stored once, answered with their places, refused wholly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dledger.errors import DLedgerError
from dledger.types import ProducerBatch
from dledger.values import MIB
from rocketstore.commit_log import appender
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.commit_log.port import CommitLog
from rocketstore.message.message import PROPERTY_DELAY, Message
from rocketstore.types import SCHEDULE_TOPIC, FlushDiskType, PutMessageStatus, PutResult, RecordHead
from tests.unit.rocketstore.commit_log.replicas import Replica, members_of, node_config
from tests.unit.rocketstore.commit_log.support import heads_of, open_log, small_config

Status = PutMessageStatus
Reopen = Callable[[], CommitLog]


@pytest.fixture(params=["replicated", "sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """A replicated log, and plain ones that flush before or after the answer."""
    return str(request.param)


@pytest.fixture
def reopen(kind: str, tmp_path: Path) -> Iterator[Reopen]:
    """Opens the log, again after it was closed; the replicated one then leads in a later term."""
    opened: list[Callable[[], None]] = []
    members = members_of(1)

    def close() -> None:
        while opened:
            opened.pop()()

    def again() -> CommitLog:
        close()
        if kind == "replicated":
            replica = Replica(node_config(tmp_path, members)).start().lead()
            replica.log.set_queue_offsets({(one.topic, one.queue_id): one.queue_offset + 1 for one in replica.heads()})
            opened.append(replica.stop)
            return replica.log
        flush = FlushDiskType.SYNC_FLUSH if kind == "sync" else FlushDiskType.ASYNC_FLUSH
        log = open_log(small_config(tmp_path, flush_disk_type=flush))
        opened.append(log.shutdown)
        return log

    yield again
    close()


@pytest.fixture
def log(reopen: Reopen) -> CommitLog:
    return reopen()


def send(
    log: CommitLog, sequence: int, bodies: Sequence[bytes], *, name: str = "p", **fields: object
) -> list[PutResult]:
    """The results of one numbered batch; its messages take turns in two queues."""
    answered, results = threading.Event(), list[PutResult]()

    def done(found: Sequence[PutResult]) -> None:
        results.extend(found)
        answered.set()

    messages = [
        Message("T", body, (sequence + place) % 2, **fields)  # type: ignore[arg-type]
        for place, body in enumerate(bodies)
    ]
    log.submit(messages, done, producer=ProducerBatch(name, sequence, len(bodies)))
    assert answered.wait(60), "no answer"
    assert len(results) == len(bodies)
    return results


def next_of(log: CommitLog, name: str = "p") -> int:
    answered, found = threading.Event(), list[int | DLedgerError]()

    def done(sequence: int | DLedgerError) -> None:
        found.append(sequence)
        answered.set()

    log.submit_producer(name, done)
    assert answered.wait(60), "no answer"
    assert isinstance(found[0], int), found
    return found[0]


def heads(log: CommitLog) -> list[RecordHead]:
    return [one for one in heads_of(log) if one.topic == "T"]  # type: ignore[arg-type]  # it only scans


def bodies_of(count: int, first: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(first, first + count)]


def statuses(results: Sequence[PutResult]) -> set[PutMessageStatus]:
    return {one.status for one in results}


def test_a_batch_that_comes_again_is_answered_with_its_places(log: CommitLog) -> None:
    """Record offset, size, queue, queue offset and store timestamp, as at first; nothing is stored."""
    first = send(log, 0, bodies_of(40))

    again = send(log, 0, bodies_of(40))

    assert again == first
    assert len(heads(log)) == 40
    assert next_of(log) == 40


def test_what_overlaps_is_stored_from_there_on(log: CommitLog) -> None:
    """Also if the batches are cut differently, and others come in between; queue offsets have no gap."""
    first = send(log, 0, bodies_of(5))
    send(log, 0, bodies_of(3), name="q")
    first += send(log, 5, bodies_of(5, 5))
    send(log, 3, bodies_of(3, 3), name="q")

    again = send(log, 3, bodies_of(12, 3))

    assert again[:7] == first[3:]
    assert statuses(again) == {Status.PUT_OK}
    assert len(heads(log)) == 21
    for queue in range(2):
        offsets = [one.queue_offset for one in heads(log) if one.queue_id == queue]
        assert offsets == list(range(len(offsets)))
    assert (next_of(log), next_of(log, "q"), next_of(log, "nobody")) == (15, 6, 0)


def test_a_hole_is_refused(log: CommitLog) -> None:
    """And an unknown producer that does not begin at 0; nothing of it is stored, and it may come later."""
    assert statuses(send(log, 1, bodies_of(2))) == {Status.UNKNOWN_PRODUCER}
    send(log, 0, bodies_of(2))
    refused = send(log, 3, bodies_of(2))
    assert statuses(refused) == {Status.OUT_OF_ORDER_SEQUENCE}
    assert {one.outcome for one in refused} == {"not_applied"}

    assert statuses(send(log, 2, bodies_of(3))) == {Status.PUT_OK}
    assert len(heads(log)) == 5


def test_a_batch_with_a_message_that_cannot_be_stored_uses_up_no_number(log: CommitLog) -> None:
    """All of it is refused: what is behind a message that is left out would get another number at each attempt."""
    results = send(log, 0, [b"fine", bytes(9 * MIB), b"fine"])

    assert results[1].status is Status.MESSAGE_ILLEGAL
    assert {one.outcome for one in results} == {"not_applied"}
    assert not heads(log)
    assert next_of(log) == 0
    assert statuses(send(log, 0, [b"fine", b"fine"])) == {Status.PUT_OK}


def test_a_delayed_message_that_comes_again_waits_once(log: CommitLog) -> None:
    """Its record is one of the schedule topic, at the queue of its level."""
    first = send(log, 0, [b"later"], properties={PROPERTY_DELAY: "3"})

    assert send(log, 0, [b"later"], properties={PROPERTY_DELAY: "3"}) == first
    assert first[0].stored is not None
    assert first[0].stored.queue_id == 2
    assert [one.topic for one in heads_of(log)] == [SCHEDULE_TOPIC]  # type: ignore[arg-type]


def test_a_new_leader_knows_what_is_stored_and_a_plain_broker_forgets(kind: str, reopen: Reopen) -> None:
    """What a plain broker does not know it refuses: it never takes a message for a new one."""
    first = send(reopen(), 0, bodies_of(4))

    log = reopen()

    if kind == "replicated":
        assert next_of(log) == 4
        assert send(log, 2, bodies_of(3, 2))[:2] == first[2:]
        assert len(heads(log)) == 5
    else:
        assert next_of(log) == 0
        assert statuses(send(log, 4, bodies_of(1))) == {Status.UNKNOWN_PRODUCER}
        assert len(heads(log)) == 4


@pytest.mark.parametrize("kind", ["async"])
def test_a_plain_broker_says_stored_where_it_does_not_remember_the_place(
    log: PlainCommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It remembers so many puts; older messages have no place in the answer, and are not stored again."""
    monkeypatch.setattr(log._appender, "numbered", appender.NumberedPuts(puts_remembered=2))
    first = [send(log, number, bodies_of(1)) for number in range(4)]

    again = send(log, 0, bodies_of(4))

    assert again == [PutResult(Status.PUT_OK), PutResult(Status.PUT_OK), *first[2], *first[3]]
    assert len(heads(log)) == 4


@pytest.mark.parametrize("kind", ["async"])
def test_at_a_plain_broker_who_repeats_or_asks_keeps_its_place(log: PlainCommitLog) -> None:
    """The one that was silent for the longest time goes first."""
    for name in ("repeats", "asks", "is-silent"):
        send(log, 0, [b"x"], name=name)

    send(log, 0, [b"x"], name="repeats")
    next_of(log, "asks")

    assert list(log._appender.numbered._table._by_name) == ["is-silent", "repeats", "asks"]


@pytest.mark.parametrize("kind", ["async"])
def test_a_plain_broker_remembers_so_many_producers(log: PlainCommitLog) -> None:
    """Then new ones are refused, with what to do, as long as all others were active lately."""
    for number in range(4096):
        send(log, 0, [b"x"], name=f"p{number}")

    (refused,) = send(log, 0, [b"x"], name="one more")

    assert (refused.status, refused.outcome) == (Status.MESSAGE_ILLEGAL, "not_applied")
    (refused,) = send(log, 0, [b"x"], name="one-more")
    assert (refused.status, refused.outcome) == (Status.TOO_MANY_PRODUCERS, "not_applied")
    assert "let clients live longer" in refused.reason
    assert send(log, 1, [b"x"], name="p0")[0].ok
