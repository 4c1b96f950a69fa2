"""Pulls that are answered at once, from memory: like those that wait for a thread, and within the same limits."""

from __future__ import annotations

import pytest

from dledger.errors import ShutdownError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

LARGE = bytes(512 * 1024)


@pytest.fixture(autouse=True)
def _all_in_memory(broker: RemotingHarness) -> None:
    broker.store.in_memory = True


def no_thread(*_args: object, **_options: object) -> None:
    raise AssertionError("a read thread was used")


def unread_bytes(broker: RemotingHarness) -> int:
    """What counts as answered and not yet read, of all clients."""
    return broker.broker.shares.quotas.root.answer_bytes


def the_connection(broker: RemotingHarness) -> RemotingConnection:
    (connection,) = broker.remoting.server._connections
    return connection


def test_messages_in_memory_need_no_thread(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the same."""
    client.subscribe("g", "T")
    for number in range(5):
        client.send(body=b"%d" % number)
    fields = pull_fields("g", "T", 1, maxMsgNums=3)
    broker.store.in_memory = False
    slow = client.ask(RequestCode.PULL_MESSAGE, fields)
    broker.store.in_memory = True
    monkeypatch.setattr(broker.broker.loop.readers, "run", no_thread)

    quick = client.ask(RequestCode.PULL_MESSAGE, fields)

    assert quick == slow._replace(opaque=quick.opaque)
    assert (quick.code, quick.fields["nextBeginOffset"], quick.fields["maxOffset"]) == (0, "4", "5")
    wait_until(lambda: unread_bytes(broker) == 0, "nothing counts as unread")


def test_waiting_for_a_message_needs_no_thread(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to see that there is none yet, nor to read the one that arrives."""
    client.subscribe("g", "T")
    client.send(body=b"first")
    monkeypatch.setattr(broker.broker.loop.readers, "run", no_thread)
    for number in (1, 2):
        fields = pull_fields("g", "T", number, sysFlag=2, suspendTimeoutMillis=20_000)
        waiting = client.begin(RequestCode.PULL_MESSAGE, fields)
        wait_until(lambda: len(broker.broker.pulling.waiting) == 1, "it waits")
        client.send(body=b"%d" % number)
        assert decode_record(client.answer_to(waiting).body).body == b"%d" % number


def test_a_filter_is_applied(client: RemotingSocket) -> None:
    """It may have to read much, so this is for a thread."""
    client.subscribe("g", "T", "b")
    for tag in "aba":
        client.send(body=tag.encode(), properties=f"TAGS\x01{tag}\x02")

    assert decode_record(client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T")).body).body == b"b"


def test_messages_of_a_deleted_topic_stay_gone(broker: RemotingHarness, client: RemotingSocket) -> None:
    client.subscribe("g", "T")
    for _ in range(3):
        client.send()
    broker.state.begins["T", 0] = 2

    assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T", 1)).code == AnswerCode.PULL_OFFSET_MOVED
    here = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T", 2))
    assert (here.code, here.fields["minOffset"], here.fields["nextBeginOffset"]) == (0, "2", "3")


def test_without_room_a_pull_waits_for_it(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Nothing is read for it meanwhile."""
    client.subscribe("g", "T")
    client.send()
    root, gets = broker.broker.shares.quotas.root, broker.store.gets
    whole = root._limits.answer_bytes_max
    broker.on_loop(lambda: root.change_answer(whole))

    pulled = client.begin(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))
    wait_until(lambda: len(broker.broker.shares.room._waiting) == 1, "it waits")
    assert broker.store.gets == gets
    broker.on_loop(lambda: root.change_answer(-whole))
    broker.on_loop(broker.broker.shares.room.grown)
    assert client.answer_to(pulled).code == 0
    wait_until(lambda: unread_bytes(broker) == 0, "nothing counts as unread")


@pytest.mark.parametrize("reads", [True, False])
def test_an_answer_counts_until_it_is_read(broker: RemotingHarness, client: RemotingSocket, *, reads: bool) -> None:
    """Or until the client is gone. The limit of unread answers would otherwise not hold for those given at once."""
    client.subscribe("g", "T")
    for _ in range(28):
        client.send(body=LARGE)
    whole = 28 * len(LARGE)

    pulled = client.begin(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))
    wait_until(lambda: the_connection(broker).is_full, "more is unsent than may be")
    wait_until(lambda: broker.remoting.server.requests_under_way == 1, "its request has not ended")
    assert unread_bytes(broker) > whole
    if reads:
        assert len(client.answer_to(pulled).body) > whole
    else:
        client.socket.close()
    wait_until(lambda: unread_bytes(broker) == 0, "nothing counts as unread")
    wait_until(lambda: broker.remoting.server.requests_under_way == 0, "the request has ended")


def test_a_refusal_gives_the_room_back(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_args: object, **_options: object) -> None:
        raise ShutdownError("the store is stopping")

    client.subscribe("g", "T")
    monkeypatch.setattr(broker.store, "get_at_once", stopped)

    assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T")).code == AnswerCode.SYSTEM_ERROR
    assert unread_bytes(broker) == 0
