"""Sends wait for others while some are being stored, and not for long."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.broker import sending
from rocketstore.commit_log.port import PutDone
from rocketstore.message.batch import encode_batch
from rocketstore.message.message import PROPERTY_KEYS, PROPERTY_WAIT, Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.types import PutMessageStatus, PutResult
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


@pytest.fixture
def puts(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages reached the store each time; it answers none by itself."""
    found: list[int] = []
    submit = broker.store.submit

    def observed(messages: Sequence[Message], done: PutDone, **others: Any) -> None:  # noqa: ANN401  # as they are
        found.append(len(messages))
        submit(messages, done, **others)

    monkeypatch.setattr(broker.store, "submit", observed)
    broker.store.hold_results = True
    return found


def begin(client: RemotingSocket, body: bytes = b"hello", properties: str = "") -> int:
    return client.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T", properties=properties), body)


def begin_and_arrive(
    broker: RemotingHarness, client: RemotingSocket, body: bytes = b"hello", properties: str = ""
) -> None:
    (connection,) = broker.remoting.server._connections
    before = connection.under_way
    begin(client, body, properties)
    wait_until(lambda: connection.under_way > before, "it has arrived")


def release(broker: RemotingHarness, count: int = sending.FLIGHTS_MAX) -> None:
    """Let the first ones be stored."""
    for _ in range(count):
        broker.store.held.pop(0)()


def _has(puts: list[int], count: int) -> bool:
    return len(puts) == count


def fill(client: RemotingSocket, puts: list[int]) -> list[int]:
    """As many as are stored without waiting; their opaques."""
    opaques = []
    for count in range(1, sending.FLIGHTS_MAX + 1):
        opaques.append(begin(client))
        wait_until(partial(_has, puts, count), "it is being stored")
    return opaques


def test_what_comes_while_others_are_stored_is_stored_together(
    broker: RemotingHarness, client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "GATHER_S_MAX", 60.0)
    opaques = fill(client, puts)
    opaques += [begin(client) for _ in range(3)]
    (connection,) = broker.remoting.server._connections
    wait_until(lambda: connection.under_way == len(opaques), "all have arrived")
    assert puts == [1] * sending.FLIGHTS_MAX

    broker.store.held.pop(0)()
    wait_until(lambda: puts == [1] * sending.FLIGHTS_MAX + [3], "the others are stored when one is done")
    for release in broker.store.held:
        release()
    assert [client.answer_to(opaque).code for opaque in opaques] == [0] * len(opaques)


def test_nothing_waits_long_for_others(
    client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are being stored may wait for a majority."""
    monkeypatch.setattr(sending, "GATHER_S_MAX", 0.01)
    fill(client, puts)
    begin(client)
    wait_until(lambda: len(puts) == sending.FLIGHTS_MAX + 1, "it is stored")
    begin(client)
    wait_until(lambda: len(puts) == sending.FLIGHTS_MAX + 2, "and so is the next one")


def test_what_is_large_enough_waits_for_nobody(
    client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "GATHER_S_MAX", 60.0)
    fill(client, puts)
    begin(client, bytes(sending.GATHER_BYTES_MAX))
    wait_until(lambda: len(puts) == sending.FLIGHTS_MAX + 1, "it is stored")


def test_what_was_stored_makes_room_for_the_next(
    broker: RemotingHarness, client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes then waits for nobody."""
    monkeypatch.setattr(sending, "GATHER_S_MAX", 60.0)
    opaques = fill(client, puts)
    release(broker)
    assert [client.answer_to(opaque).code for opaque in opaques] == [0] * len(opaques)
    puts.clear()

    assert len(fill(client, puts)) == sending.FLIGHTS_MAX


def test_only_what_still_waits_counts_as_waiting(
    broker: RemotingHarness, client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, after the first 64 KiB, each send would be stored alone for ever."""
    monkeypatch.setattr(sending, "GATHER_S_MAX", 60.0)
    most_of_it = bytes(sending.GATHER_BYTES_MAX * 3 // 4)
    fill(client, puts)
    begin_and_arrive(broker, client, most_of_it)
    release(broker, 1)
    wait_until(lambda: len(puts) == sending.FLIGHTS_MAX + 1, "it is stored when another one is done")

    begin_and_arrive(broker, client, most_of_it)
    begin_and_arrive(broker, client)
    release(broker, 1)
    wait_until(lambda: len(puts) > sending.FLIGHTS_MAX + 1, "they are stored")
    assert puts == [1] * sending.FLIGHTS_MAX + [1, 2]


def test_the_wait_for_others_ends_when_they_are_stored(
    broker: RemotingHarness,
    client: RemotingSocket,
    puts: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its timer would cut short the wait of those that come later, or find nothing to store."""
    monkeypatch.setattr(sending, "GATHER_S_MAX", 0.3)
    fill(client, puts)
    begin_and_arrive(broker, client)
    release(broker, 1)
    wait_until(lambda: len(puts) == sending.FLIGHTS_MAX + 1, "it is stored when another one is done")
    over = threading.Event()

    async def end_later() -> None:
        asyncio.get_running_loop().call_later(sending.GATHER_S_MAX, over.set)

    broker.bridge.run(end_later())

    assert over.wait(30)
    assert [one.message for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_who_waits_for_the_disk_is_not_stored_with_who_does_not(
    broker: RemotingHarness, client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be acknowledged as early as they are."""
    monkeypatch.setattr(sending, "GATHER_S_MAX", 60.0)
    fill(client, puts)
    for waits in ("false", "true", "true", "false"):
        begin_and_arrive(broker, client, properties=f"{PROPERTY_WAIT}\x01{waits}")
    release(broker, 1)
    wait_until(lambda: sum(puts) == sending.FLIGHTS_MAX + 4, "they are stored")

    assert puts == [1] * sending.FLIGHTS_MAX + [1, 2, 1]


TOO_MANY = {PROPERTY_KEYS: " ".join(map(str, range(100)))}
TOO_LONG = {"long": "x" * 32_750}
"""It is only known when the broker has added its own property."""


@pytest.mark.parametrize(("bad", "properties"), [(None, {}), (1, TOO_MANY), (1, TOO_LONG)])
def test_a_batch_that_is_refused_takes_no_other_with_it(
    broker: RemotingHarness,
    client: RemotingSocket,
    puts: list[int],
    monkeypatch: pytest.MonkeyPatch,
    bad: int | None,
    properties: dict[str, str],
) -> None:
    """Batches are stored together: all of them or none."""
    monkeypatch.setattr(sending, "GATHER_S_MAX", 60.0)
    singles = fill(client, puts)
    store_refuses = properties is TOO_LONG
    opaques = []
    for number in range(3):
        batch = [Message("T", b"first"), Message("T", b"%d" % number, properties=properties if number == bad else {})]
        fields = send_fields("T") | {"m": "true"}
        opaques.append(client.begin(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch(batch)))
    (connection,) = broker.remoting.server._connections
    wait_until(
        lambda: connection.under_way == len(singles) + (3 if bad is None or store_refuses else 2), "all have arrived"
    )
    broker.store.hold_results = False
    if store_refuses:
        broker.store.refusals.append(PutResult(PutMessageStatus.PROPERTIES_SIZE_EXCEEDED, outcome="not_applied"))
    for release in broker.store.held:
        release()

    answers = [client.answer_to(opaque) for opaque in opaques]
    assert [answer.code == AnswerCode.SUCCESS for answer in answers] == [number != bad for number in range(3)]
    assert puts[sending.FLIGHTS_MAX :] == ([6] if bad is None else [6, 4] if store_refuses else [4])
    bodies = [decode_record(one.record).body for one in broker.store.log.records[len(singles) :]]
    assert bodies == [body for number in range(3) if number != bad for body in (b"first", b"%d" % number)]
    offsets = [int(answer.fields["queueOffset"]) for answer in answers if answer.code == AnswerCode.SUCCESS]
    assert offsets == [2 + 2 * place for place in range(len(offsets))]
    pending = broker.broker.sending
    wait_until(lambda: (pending.messages_pending, pending.bytes_pending) == (0, 0), "all room is free again")
