"""Clients that were used before a fork, in the child: an error at once that says what to do, and the parent goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.fake_broker import FakeBrokers, fake_brokers
from tests.support.fake_group import fake_group

PROGRAM = """
import faulthandler, os, signal, sys, time
from dledger.client import DLedgerClient
from dledger.errors import UnavailableError
from rocketstore.client.consumer import Consumer
from rocketstore.client.group_consumer import GroupConsumer
from rocketstore.client.producer import Producer
from rocketstore.message.message import Message
{setup}
for _ in range(2):
    {use}
pid = os.fork()
if not pid:
    signal.alarm(20)
    try:
        for _ in range(2):
            try:
                {use}
            except UnavailableError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("it worked")
        {close}
    except BaseException as error:
        sys.stderr.write(repr(error))
        os._exit(3)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
{use}
{close}
assert status == 0, status
"""
CASES = {
    "producer": ("one = Producer(sys.argv[1])", "one.send(Message('T', b'x'))", "one.close()"),
    "sender": ("one = Producer(sys.argv[1]).sender()", "one.send(Message('T', b'x')).result(10)", "one.close()"),
    "consumer": (
        "one = Consumer(sys.argv[1], group='g', topic='T', start='first'); one.poll(timeout_s=5)",
        "one.poll(timeout_s=0.1)",
        "one.close()",
    ),
    "group": (
        "one = GroupConsumer(sys.argv[1], group='g', start='first'); one.subscribe('T'); one.start()",
        "one.receive(0.1)",
        "one.close()",
    ),
    "appender": ("one = DLedgerClient(sys.argv[1]).appender()", "one.append(b'x').result(10)", "one.close()"),
    "log": ("one = DLedgerClient(sys.argv[1])", "one.append(b'x')", "one.close()"),
}


@pytest.fixture(scope="module")
def brokers() -> Iterator[FakeBrokers]:
    with fake_brokers() as group:
        group.add_topic("T", 2)
        yield group


def run(program: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["producer", "sender", "consumer", "group"])
def test_clients_of_brokers(brokers: FakeBrokers, name: str) -> None:
    """Their locks may be held by threads that are not in the child, and gRPC's are not there, either."""
    setup, use, close = CASES[name]
    done = run(PROGRAM.format(setup=setup, use=use, close=close), brokers.addresses[0])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["appender", "log"])
def test_clients_of_the_log(name: str) -> None:
    """The same."""
    setup, use, close = CASES[name]
    with fake_group(1) as group:
        done = run(PROGRAM.format(setup=setup, use=use, close=close), group.addresses[0])
    assert done.returncode == 0, done.stderr


def test_what_is_pending_at_the_fork_fails_in_the_child_and_is_sent_by_the_parent(brokers: FakeBrokers) -> None:
    """Callbacks of the application run in the parent alone, and once."""
    program = """
import os, sys
from dledger.errors import DLedgerError
from rocketstore.client.producer import Producer
from rocketstore.message.message import Message
sender = Producer(sys.argv[1]).sender(linger_ms=500)
sender.send(Message("T", b"first")).result()
called = []
pending = sender.send(Message("T", b"pending"))
pending.add_done_callback(called.append)
pid = os.fork()
if not pid:
    error = pending.exception(10)
    good = isinstance(error, DLedgerError) and error.outcome == "unknown" and not called
    os._exit(0 if good else 3)
assert os.waitpid(pid, 0)[1] == 0
assert pending.result(10).queue_offset >= 0
sender.close()
assert len(called) == 1
"""
    done = run(program, brokers.addresses[0])
    assert done.returncode == 0, done.stderr
    assert brokers.bodies("T").count(b"pending") == 1
