"""Sends wait for others while some are being stored, and not for long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rocketstore.broker.remoting import sends
from rocketstore.commit_log.port import PutDone
from rocketstore.message.batch import encode_batch
from rocketstore.message.message import PROPERTY_KEYS, Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import AnswerCode, RequestCode
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.remoting.harness import RemotingHarness


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


def begin(client: RemotingSocket, body: bytes = b"hello") -> int:
    return client.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T"), body)


def _has(puts: list[int], count: int) -> bool:
    return len(puts) == count


def fill(client: RemotingSocket, puts: list[int]) -> list[int]:
    """As many as are stored without waiting; their opaques."""
    opaques = []
    for count in range(1, sends.FLIGHTS_MAX + 1):
        opaques.append(begin(client))
        wait_until(partial(_has, puts, count), "it is being stored")
    return opaques


def test_what_comes_while_others_are_stored_is_stored_together(
    broker: RemotingHarness, client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sends, "GATHER_S_MAX", 60.0)
    opaques = fill(client, puts)
    opaques += [begin(client) for _ in range(3)]
    (connection,) = broker.remoting.server._connections
    wait_until(lambda: connection.under_way == len(opaques), "all have arrived")
    assert puts == [1] * sends.FLIGHTS_MAX

    broker.store.held.pop(0)()
    wait_until(lambda: puts == [1] * sends.FLIGHTS_MAX + [3], "the others are stored when one is done")
    for release in broker.store.held:
        release()
    assert [client.answer_to(opaque).code for opaque in opaques] == [0] * len(opaques)


def test_nothing_waits_long_for_others(
    client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are being stored may wait for a majority."""
    monkeypatch.setattr(sends, "GATHER_S_MAX", 0.01)
    fill(client, puts)
    begin(client)
    wait_until(lambda: len(puts) == sends.FLIGHTS_MAX + 1, "it is stored")
    begin(client)
    wait_until(lambda: len(puts) == sends.FLIGHTS_MAX + 2, "and so is the next one")


def test_what_is_large_enough_waits_for_nobody(
    client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sends, "GATHER_S_MAX", 60.0)
    fill(client, puts)
    begin(client, bytes(sends.GATHER_BYTES_MAX))
    wait_until(lambda: len(puts) == sends.FLIGHTS_MAX + 1, "it is stored")


@pytest.mark.parametrize("bad", [None, 1])
def test_a_batch_that_is_refused_takes_no_other_with_it(
    broker: RemotingHarness, client: RemotingSocket, puts: list[int], monkeypatch: pytest.MonkeyPatch, bad: int | None
) -> None:
    """Batches are stored together: all of them or none."""
    monkeypatch.setattr(sends, "GATHER_S_MAX", 60.0)
    singles = fill(client, puts)
    too_many = {PROPERTY_KEYS: " ".join(map(str, range(100)))}
    opaques = []
    for number in range(3):
        batch = [Message("T", b"first"), Message("T", b"%d" % number, properties=too_many if number == bad else {})]
        fields = send_fields("T") | {"m": "true"}
        opaques.append(client.begin(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch(batch)))
    (connection,) = broker.remoting.server._connections
    wait_until(lambda: connection.under_way == len(singles) + 3, "all have arrived")
    broker.store.hold_results = False
    for release in broker.store.held:
        release()

    answers = [client.answer_to(opaque) for opaque in opaques]
    assert [answer.code == AnswerCode.SUCCESS for answer in answers] == [number != bad for number in range(3)]
    assert puts[sends.FLIGHTS_MAX :] == ([6] if bad is None else [2, 2])
    bodies = [decode_record(one.record).body for one in broker.store.log.records[len(singles) :]]
    assert bodies == [body for number in range(3) if number != bad for body in (b"first", b"%d" % number)]
    offsets = [int(answer.fields["queueOffset"]) for answer in answers if answer.code == AnswerCode.SUCCESS]
    assert offsets == [2 + 2 * place for place in range(len(offsets))]
