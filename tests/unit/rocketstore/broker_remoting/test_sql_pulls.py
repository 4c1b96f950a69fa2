"""Pulls with SQL conditions: which messages they give, when they are woken, what a broker without them says."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.broker import reading
from rocketstore.broker_remoting.pulls import SUBSCRIPTION, SUSPEND
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.test_server import plain, running

MISSES = 100_000


def fields(expression: str, wait_ms: int = 0, offset: int = 0, **others: object) -> dict[str, object]:
    """A pull of topic T that contains its subscription."""
    wish = {
        "sysFlag": SUBSCRIPTION | (SUSPEND if wait_ms else 0),
        "subscription": expression,
        "expressionType": "SQL92",
        "suspendTimeoutMillis": wait_ms,
    }
    return pull_fields("g", "T", offset) | wish | others


def pull(client: RemotingSocket, expression: str, wait_ms: int = 0, **others: object) -> Frame:
    return client.ask(RequestCode.PULL_MESSAGE, fields(expression, wait_ms, **others))  # type: ignore[arg-type]  # by name


def send(client: RemotingSocket, *amounts: object, name: str = "amount") -> None:
    for amount in amounts:
        assert client.send(properties=f"{name}\x01{amount}\x02TAGS\x01paid", body=b"%a" % amount).code == 0


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("amount > 1", [1, 3]),
        ("amount BETWEEN 1 AND 2 AND TAGS = 'paid'", [0, 1]),
        ("amount IS NULL", []),
        ("amount > 1 -- and no more", [1, 3]),
        ("TRUE", [0, 1, 2, 3]),
    ],
)
def test_only_messages_that_fulfil_the_condition_are_given(
    broker: RemotingHarness, client: RemotingSocket, expression: str, wanted: list[int]
) -> None:
    """What does not is passed over, and not asked for again; what cannot be compared is counted."""
    send(client, 1, 2, "many", 3)
    answer = pull(client, expression)
    assert answer.body == b"".join(broker.store.log.records[at].record for at in wanted)
    assert answer.fields["nextBeginOffset"] == "4"
    assert broker.broker.counters().filter_errors == (1 if ">" in expression or "BETWEEN" in expression else 0)


def test_a_pull_without_its_subscription_goes_by_the_heartbeat(client: RemotingSocket) -> None:
    """As Java's push consumers do."""
    client.subscribe("g", "T", "amount > 1", kind="SQL92")
    send(client, 1, 2)
    answer = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T", expressionType="SQL92"))
    assert decode_record(answer.body).properties["amount"] == "2"


def test_a_wrong_condition_is_refused_with_the_place(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Also one that came with a heartbeat, which is taken, as in RocketMQ."""
    assert client.subscribe("g", "T", "amount >", kind="SQL92").code == 0
    for answer in (pull(client, "amount >"), client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))):
        assert answer.code == AnswerCode.SUBSCRIPTION_PARSE_FAILED
        assert "wrong at character 9: found the end" in answer.remark
    send(client, 1)
    broker.store.in_memory = True
    for all_tags in ("*", ""):  # which mean every message only among tags
        assert pull(client, all_tags).code == AnswerCode.SUBSCRIPTION_PARSE_FAILED


def test_a_broker_that_filters_by_tags_only_says_so(broker: RemotingHarness, client: RemotingSocket) -> None:
    """In RocketMQ's words, with the name of the setting; what was subscribed before is not served any more."""
    client.subscribe("g", "T", "amount > 1", kind="SQL92")
    assert client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, b"enablePropertyFilter=false").code == 0
    for answer in (pull(client, "amount > 1"), client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))):
        assert answer.code == AnswerCode.SYSTEM_ERROR
        assert answer.remark.startswith("The broker does not support consumer to filter message by SQL92")
        assert "enablePropertyFilter" in answer.remark
    unknown = client.ask(RequestCode.PULL_MESSAGE, fields("a", expressionType="XML"))
    assert (unknown.code, "by XML" in unknown.remark) == (AnswerCode.SYSTEM_ERROR, True)


def test_a_waiting_pull_is_answered_by_the_first_message_that_suits(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Others wake it, and make it go on behind them."""
    pending = client.begin(RequestCode.PULL_MESSAGE, fields("amount > 1", 20_000))
    wait_until(lambda: len(broker.broker.pulling.waiting) == 1 and broker.store.gets == 1, "it has looked, and waits")
    with broker.dial() as producer:
        send(producer, 1)
        wait_until(lambda: broker.store.gets == 2, "it has looked again")
        send(producer, 1, 2)
        answer = client.answer_to(pending)
    assert decode_record(answer.body).properties["amount"] == "2"
    assert answer.fields["nextBeginOffset"] == "3"


def test_many_messages_in_vain_do_not_make_a_waiting_pull_look_at_each(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses after one: else each message would be a read for each waiting consumer."""
    monkeypatch.setattr("rocketstore.broker.pull.SQL_PAUSE_S", 60.0)
    send(client, 1)
    pending = client.begin(RequestCode.PULL_MESSAGE, fields("amount > 1", 500))
    wait_until(lambda: broker.store.gets == 1, "it has looked")
    with broker.dial() as producer:
        send(producer, *[1] * 20)
    assert client.answer_to(pending).fields["nextBeginOffset"] == "21"
    assert broker.store.gets <= 3


def test_a_slave_filters_too(broker: RemotingHarness, client: RemotingSocket) -> None:
    send(client, 1, 2)
    broker.become(BrokerRole.SLAVE)
    assert decode_record(pull(client, "amount > 1").body).properties["amount"] == "2"


def test_new_conditions_are_parsed_beside_the_loop(client: RemotingSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones take tens of milliseconds; known ones are not parsed again."""
    threads: list[str] = []

    class Noted(reading.SqlFilter):
        def __init__(self, *args: object) -> None:
            threads.append(threading.current_thread().name)
            super().__init__(*args)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(reading, "SqlFilter", Noted)
    for _ in range(3):
        pull(client, "amount > 1")
    assert [one.rpartition("_")[0] for one in threads] == ["rocketstore-read"]


@pytest.mark.slow
def test_a_hundred_thousand_misses_are_passed_in_parts(tmp_path: Path) -> None:
    """Each pull that may wait is answered within about a second, and has moved on; the message behind them is found."""
    with running(plain(tmp_path)) as server, RemotingSocket(server.port) as client:
        client.send("T", properties="amount\x010")
        properties = {"amount": "1", "KEYS": "some key", "region": "EU"}
        for _ in range(MISSES // 1000):
            results = server.store.put_many([Message("T", b"miss", properties=dict(properties)) for _ in range(1000)])
            assert all(one.ok for one in results)
        client.send("T", properties="amount\x012")
        wait_until(lambda: server.store.max_offset("T", 0) == MISSES + 2, "dispatch")
        at, found, longest_s = 0, b"", 0.0
        while not found:
            began = time.monotonic()
            answer = pull(client, "amount > 1 AND region IS NULL", 20_000, offset=at)
            longest_s = max(longest_s, time.monotonic() - began)
            assert int(answer.fields["nextBeginOffset"]) > at
            at, found = int(answer.fields["nextBeginOffset"]), answer.body
        assert decode_record(found).properties["amount"] == "2"
        assert at == MISSES + 2
        assert longest_s < 5  # a second on a machine that does nothing else
