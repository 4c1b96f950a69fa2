"""Handlers that end the wrong way, hang, or cannot read, and brokers that take nothing back."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from dledger.errors import InvalidRequestError, UnavailableError
from rocketstore.client.group_branch import Branch
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.group_options import GroupOptions
from rocketstore.client.shares import GroupDelivery
from rocketstore.pb import broker_pb2 as pb
from rocketstore.state.changes import TopicConfig
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.client.test_group_consumer import Seen, committed, member, put, stored


@pytest.fixture
def broker() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        harness.state.table["%RETRY%g"] = TopicConfig("%RETRY%g", 1, 1)
        yield harness


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done from time to time is done often."""
    for name, seconds in (("AGAIN_S_MIN", 0.05), ("AGAIN_S_MAX", 0.05), ("LOOK_LATE_S", 0.05), ("LATE_S", 0.2)):
        monkeypatch.setattr(f"rocketstore.client.group_consumer.{name}", seconds)


def once(error: BaseException) -> Callable[[GroupDelivery], None]:
    """Raises for the first message alone, when it comes for the first time."""

    def handle(delivery: GroupDelivery) -> None:
        if delivery.body == b"0" and not delivery.attempts:
            raise error

    return handle


def retried(broker: RemotingHarness) -> list[bytes]:
    return [one.body for one in stored(broker) if one.properties.get("RETRY_TOPIC")]


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()])
def test_a_handler_may_raise_anything(
    broker: RemotingHarness, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """It is logged, the message sent back, and the only worker goes on."""
    seen = Seen(once(error))
    put(broker, 8)
    options = GroupOptions(start="first", commit_s=0.05, timeout_s=15.0)
    with GroupConsumer([broker.address], group="g", options=options) as one:
        one.subscribe("T")
        one.start(seen, workers=1)
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 2), "all is done")
    assert retried(broker) == [b"0"]
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)


def test_a_retry_topic_that_cannot_be_made_is_an_error_and_the_others_go_on(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a single worker. The messages wait, and are taken back once that is possible."""
    put_back, refuses = Branch.put_back, threading.Event()
    refuses.set()

    def refused(self: Branch, request: pb.SendBackRequest) -> None:
        if refuses.is_set():
            raise UnavailableError("topic[%RETRY%g] not exist: queues_max")
        put_back(self, request)

    monkeypatch.setattr(Branch, "put_back", refused)

    def fail(delivery: GroupDelivery) -> None:
        if int(delivery.body) < 8 and not delivery.attempts:
            raise ValueError("scripted")

    sent, seen = put(broker, 20), Seen(fail)
    with member(broker, seen):
        wait_until(lambda: set(seen.bodies) == set(sent), "each comes")
        said = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert len(said) == 1
        assert "queues_max" in said[0].message
        refuses.clear()
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 5), "all is done")
    assert sorted(retried(broker)) == sorted(sent[:8])


@pytest.mark.parametrize("retries_max", [0, 2, None])
def test_what_no_broker_will_ever_take_back_ends(
    broker: RemotingHarness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    retries_max: int | None,
) -> None:
    """Its record is gone, or it is too large for a copy: tried here as often as allowed, then given up with a word."""

    def refused(self: Branch, request: pb.SendBackRequest) -> None:
        levels.append(request.delay_level)
        raise InvalidRequestError("scripted")

    def fail(delivery: GroupDelivery) -> None:
        if delivery.body == b"0":
            raise ValueError("scripted")

    levels: list[int] = []
    monkeypatch.setattr(Branch, "put_back", refused)
    monkeypatch.setattr("rocketstore.client.group_consumer.RETRIES", 3)
    put(broker, 8)
    seen = Seen(fail)
    with member(broker, seen, retries_max=retries_max):
        wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 2), "all is done")
    tries = 3 if retries_max is None else retries_max
    assert Counter(seen.bodies)[b"0"] == tries + 1
    assert levels == [0] * max(tries, 1) + [-1] * bool(tries)  # in the end as a dead letter
    assert sum("is given up after" in one.message for one in caplog.records) == 1


def test_a_message_that_hangs_is_told_and_sent_back(broker: RemotingHarness, caplog: pytest.LogCaptureFixture) -> None:
    """The lag counts what is behind it; the queue goes on no further than the span; then its time is over."""
    put(broker, 40)
    go = threading.Event()

    def hang(delivery: GroupDelivery) -> None:
        if delivery.body == b"0" and not delivery.attempts:
            go.wait(30)

    seen = Seen(hang)
    try:
        with member(broker, seen, pending_span_max=5, consume_timeout_s=1.0) as one:
            wait_until(lambda: len(seen.bodies) == 35, "the other queues, and five of this one")
            lags = {name.queue_id: lag for name, lag in one.lag().items() if name.topic == "T"}
            assert lags == {0: 10, 1: 0, 2: 0, 3: 0}
            wait_until(lambda: "has been in use for" in caplog.text, "it is told")
            wait_until(lambda: committed(broker) == dict.fromkeys(range(4), 10), "it is sent back")
            go.set()
    finally:
        go.set()
    assert "consume_timeout_s" in caplog.text
    assert retried(broker) == [b"0"]


def test_in_order_a_message_that_hangs_is_only_told(broker: RemotingHarness, caplog: pytest.LogCaptureFixture) -> None:
    """Another one must not overtake it."""
    put(broker, 8)
    with member(broker, ordered=True, consume_timeout_s=0.3) as one:
        held = [one.receive(15.0) for _ in range(4)]
        wait_until(lambda: "has been in use for" in caplog.text, "it is told")
        assert one.receive(0.5) is None
        for each in held:
            assert each is not None
            one.ack(each)
        assert one.receive(15.0) is not None
    assert retried(broker) == []


def test_it_may_be_closed_at_any_moment_of_its_start(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the handler of a signal, which runs between any two steps of the thread that starts it."""
    steps, begin = 0, threading.Thread.start
    while True:
        one = GroupConsumer([broker.address], group="g", options=GroupOptions(start="first", timeout_s=15.0))
        one.subscribe("T")
        left = steps

        def start_of(thread: threading.Thread, one: GroupConsumer = one) -> None:
            nonlocal left
            if threading.current_thread() is threading.main_thread() and thread.name.startswith("rocketstore-"):
                left -= 1
                if left == -1:
                    one.close()
            begin(thread)
            if threading.current_thread() is threading.main_thread() and thread.name.startswith("rocketstore-"):
                left -= 1
                if left == -1:
                    one.close()

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_of)
            try:
                one.start(lambda _: None, workers=2)
            except UnavailableError:
                one.close()
            else:
                if left >= 0:  # there are no further steps
                    one.close()
                    break
                one.close()
        steps += 1
    assert steps >= 6


LZ4 = 0x101
ZSTD = 0x201


@pytest.mark.parametrize("flags", [LZ4, ZSTD])
def test_bodies_that_cannot_be_read_here_burn_no_retries(
    broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: int
) -> None:
    """That is said once, with what to install. They are kept until a member can read them."""
    name = "lz4.frame" if flags == LZ4 else "zstandard"
    monkeypatch.setitem(sys.modules, name, None)
    for number in range(2):
        broker.send(pb.Message(topic="T", body=zlib.compress(b"%d" % number), queue_id=number, sys_flag=flags))
    put(broker, 2, 2)
    seen = Seen()
    with member(broker, seen):
        wait_until(lambda: sorted(seen.bodies) == [b"2", b"3"], "the others come")
        wait_until(lambda: len(errors(caplog)) >= 1, "it is told")
        assert committed(broker).get(0, 0) == 0
    assert len(errors(caplog)) == 1
    assert "extra 'compression'" in errors(caplog)[0]
    assert retried(broker) == []
    monkeypatch.setitem(sys.modules, name, stand_in(name))
    with member(broker, seen):
        wait_until(lambda: sorted(seen.bodies) == [b"0", b"1", b"2", b"3"], "now they can be read")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if one.levelno == logging.ERROR]


def stand_in(name: str) -> ModuleType:
    """A module with the names that are used of the real one, over zlib."""
    module = ModuleType(name)

    class Inflating:
        eof = True

        def decompress(self, body: bytes, _max: int) -> bytes:
            return zlib.decompress(body)

        def stream_reader(self, body: bytes) -> object:
            class Reader:
                def __enter__(self) -> Reader:
                    return self

                def __exit__(self, *_: object) -> None: ...

                def read(self, _size: int) -> bytes:
                    return zlib.decompress(body)

            return Reader()

    module.LZ4FrameDecompressor = module.ZstdDecompressor = Inflating  # type: ignore[attr-defined]  # of the real ones
    module.ZstdError = RuntimeError  # type: ignore[attr-defined]  # as above
    return module
