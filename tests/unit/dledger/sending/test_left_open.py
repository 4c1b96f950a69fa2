"""Programs that end without closing what they send with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.fake_broker import fake_brokers
from tests.support.fake_group import fake_group

SENDER = """
import sys
from rocketstore.client.producer import Producer
from rocketstore.message.message import Message
sender = Producer(sys.argv[1]).sender(linger_ms=60_000)
for number in range(100):
    sender.send(Message("T", b"%d" % number))
"""
APPENDER = """
import sys
from dledger.client import DLedgerClient
appender = DLedgerClient(sys.argv[1]).appender(linger_ms=60_000)
for number in range(100):
    appender.append(b"%d" % number)
"""


def run(program: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_what_lingers_in_a_sender_is_sent_and_told(end: str, code: int) -> None:
    """However the program ends, with the number."""
    with fake_brokers() as brokers:
        brokers.add_topic("T", 1)
        done = run(SENDER + end, brokers.addresses[0])
        assert (done.returncode, len(brokers.bodies("T"))) == (code, 100)
    assert "100 items were still in rocketstore-sender" in done.stderr


def test_what_cannot_be_sent_any_more_is_told() -> None:
    """The end waits for it no longer than the sender would."""
    with fake_brokers() as brokers:
        brokers.add_topic("T", 1)
        for node in brokers.nodes:
            node.gate.clear()
        done = run(SENDER.replace("sys.argv[1])", "sys.argv[1], timeout_s=1)"), brokers.addresses[0])
        for node in brokers.nodes:
            node.gate.set()
    assert done.returncode == 0
    assert "100 of them failed" in done.stderr


def test_what_lingers_in_an_appender_is_sent_and_told() -> None:
    """As in a sender."""
    with fake_group(1) as group:
        done = run(APPENDER, group.addresses[0])
        stored = [one.body for one in group.nodes[0].entries]
    assert done.returncode == 0, done.stderr
    assert [one for one in stored if one] == [b"%d" % number for number in range(100)]
    assert "100 items were still in dledger-appender" in done.stderr


def test_nothing_is_told_of_what_was_closed_or_has_been_sent() -> None:
    """Standard error stays empty."""
    for end in ("sender.close()", "sender.flush()"):
        with fake_brokers() as brokers:
            brokers.add_topic("T", 1)
            done = run(SENDER + end, brokers.addresses[0])
            assert (done.returncode, done.stderr) == (0, "")
