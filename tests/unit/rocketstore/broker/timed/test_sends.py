"""How many timed messages a broker takes in, and what a client is told that sends more.

How many timed messages an owner has waiting, as the broker counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dledger.rpc.loops import LoopBridge
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.broker.timed import service as sends_module
from rocketstore.broker.timed.service import HOUR_MS, MINUTE_MS, TimedQuota, TimedSends
from rocketstore.client import ClientError, Message, Producer
from rocketstore.types import PutMessageStatus, PutResult
from tests.support.on_loop import on_loop
from tests.support.waiting import wait_until
from tests.unit.rocketstore.test_server import plain, running

NOW_MS = 1_000 * HOUR_MS


def until_refused(producer: Producer, due_ms: int, words: str) -> None:
    """The producer tries until its deadline; of the last try it may tell that there was no time for an answer."""

    def is_told() -> bool:
        with pytest.raises(ClientError) as refused:
            producer.send(Message("T", b"", deliver_at=due_ms))
        return words in str(refused.value)

    wait_until(is_told, f"the refusal says {words!r}")


def test_a_broker_takes_in_so_many_messages_and_again_when_some_are_recalled(tmp_path: Path) -> None:
    """T7: flow control, which names the setting; messages without a time are not concerned."""
    with (
        running(plain(tmp_path, timedMessagesMax="5", account_share_percent="100")) as server,
        Producer(server.address, timeout_s=3) as producer,
    ):
        base_ms = int(time.time() * 1000) + HOUR_MS
        handles = [
            producer.send(Message("T", b"", deliver_at=base_ms + number * HOUR_MS)).recall_handle for number in range(5)
        ]
        words = "5 messages wait for their time already (timed_messages_max): try again later"
        until_refused(producer, base_ms + 9 * HOUR_MS, words)
        assert producer.send(Message("T", b"")).offset >= 0
        producer.recall(handles[0])
        assert producer.send(Message("T", b"", deliver_at=base_ms)).recall_handle  # within the second of a new count


def test_one_client_may_not_use_all_the_room(tmp_path: Path) -> None:
    """T7: its account's share, or its address's; the broker itself, and others, may use the rest."""
    with (
        running(plain(tmp_path, timedMessagesMax="6", account_share_percent="50")) as server,
        Producer(server.address, timeout_s=3) as producer,
    ):
        due_ms = int(time.time() * 1000) + HOUR_MS
        for _ in range(3):
            producer.send(Message("T", b"", deliver_at=due_ms))
        until_refused(
            producer, due_ms, "3 messages of 127.0.0.1 wait for their time (timed_messages_max, account_share"
        )
        assert producer.send(Message("T", b"")).offset >= 0
        assert server.store.timers.open_count(due_ms - HOUR_MS)[0] == 3


def test_a_second_takes_so_many_and_the_next_one_more(tmp_path: Path) -> None:
    """T7: or nothing else would be delivered for minutes."""
    with (
        running(plain(tmp_path, timedMessagesPerSMax="3")) as server,
        Producer(server.address, timeout_s=3) as producer,
    ):
        due_ms = (int(time.time()) + 3600) * 1000
        for number in range(3):
            producer.send(Message("T", b"", deliver_at=due_ms + number))
        wait_until(lambda: server.store.timers.due_in(due_ms) == 3, "they are counted")
        words = "3 messages are due in that second (timed_messages_per_s_max): choose another one"
        until_refused(producer, due_ms + 999, words)
        producer.send(Message("T", b"", deliver_at=due_ms + 1000))


def test_a_time_beyond_the_limit_is_refused_for_good(tmp_path: Path) -> None:
    """T7: with the setting's name."""
    with (
        running(plain(tmp_path, timerMaxDelaySec="60")) as server,
        Producer(server.address, timeout_s=3) as producer,
    ):
        due_ms = int(time.time() * 1000) + HOUR_MS
        until_refused(producer, due_ms, "at most 60 s are allowed (timerMaxDelaySec)")


def recalls(confirmed: PutResult, told: RefusalKind = RefusalKind.NO_MESSAGE) -> TimedSends:
    """On the loop: of a broker that refuses every recall so, and whose log then says whether it still leads."""

    async def on_a_thread(work: Callable[..., str], *args: object) -> str:
        return work(*args)

    def refuse(*_: object) -> str:
        raise Refusal(told, "there is no such message")

    unused = cast(Any, None)
    master = cast(Any, SimpleNamespace(require=lambda: None, leader_address="n1:10911"))
    timed, readers = cast(Any, SimpleNamespace(recall=refuse, timers=None)), cast(Any, SimpleNamespace(run=on_a_thread))
    return TimedSends(unused, timed, master, readers, LoopBridge(), unused, lambda confirm: confirm(confirmed))


@on_loop
async def test_a_master_that_was_replaced_does_not_say_that_there_is_no_such_message() -> None:
    """T5: the message may be one that its successor has stored, which is to be asked."""
    replaced = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="unknown", reason="another one leads")
    with pytest.raises(Refusal, match="another one leads") as refused:
        await recalls(replaced).recall("T", "handle")
    assert (refused.value.kind, refused.value.outcome) == (RefusalKind.UNAVAILABLE, "not_applied")
    assert refused.value.leader == "n1:10911"

    with pytest.raises(Refusal, match="no such message") as refused:
        await recalls(PutResult(PutMessageStatus.PUT_OK)).recall("T", "handle")
    assert refused.value.kind is RefusalKind.NO_MESSAGE
    with pytest.raises(Refusal) as refused:
        await recalls(replaced, RefusalKind.INVALID).recall("T", "handle")
    assert refused.value.kind is RefusalKind.INVALID


def test_a_message_counts_for_its_owner_until_it_is_due_and_hardly_longer() -> None:
    """Else a stream of short delays would fill a share that is meant for those that wait."""
    shares = TimedQuota()
    for due_ms in (NOW_MS + 1, NOW_MS + 30 * MINUTE_MS, NOW_MS + 30 * HOUR_MS):
        shares.add("a", due_ms, NOW_MS)
    shares.add("b", NOW_MS + HOUR_MS, NOW_MS)

    def waiting(after_ms: int) -> tuple[int, int]:
        now_ms = NOW_MS + after_ms
        return shares.waiting("a", now_ms), shares.waiting("b", now_ms)

    assert waiting(0) == (3, 1)
    assert waiting(MINUTE_MS) == (2, 1)
    assert waiting(30 * MINUTE_MS) == (2, 1)
    assert waiting(31 * MINUTE_MS) == (1, 1)
    assert waiting(61 * MINUTE_MS) == (1, 0)
    assert waiting(30 * HOUR_MS) == (1, 0)
    assert waiting(31 * HOUR_MS) == (0, 0)


def test_a_later_message_does_not_keep_an_earlier_one_counted() -> None:
    """Whichever of them came first."""
    shares = TimedQuota()
    for due_ms in (NOW_MS + 30 * HOUR_MS, NOW_MS + 1):
        shares.add("a", due_ms, NOW_MS)
    assert shares.waiting("a", NOW_MS + MINUTE_MS) == 1


def test_owners_and_times_without_end_take_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes then counts for a period that is there; what is due makes room."""
    monkeypatch.setattr(sends_module, "PERIODS_MAX", 3)
    shares = TimedQuota()
    for hours in range(5):
        shares.add("a", NOW_MS + hours * HOUR_MS, NOW_MS)
    assert shares.waiting("a", NOW_MS) == 5
    assert shares.periods == 3
    assert shares.waiting("a", NOW_MS + 4 * HOUR_MS) == 0
    assert shares.periods == 0
