"""``dledger bench`` against real nodes: its figures are of records that are there."""

from __future__ import annotations

import json
from collections.abc import Callable

from click.testing import CliRunner

from dledger_cli.cli import main
from rocketstore.client.blocking import Admin
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import Group
from tests.support.waiting import wait_until


def committed(group: Group) -> int:
    """How far the leader's log is committed."""
    return group.status(group.leader()).committed_index


def test_appended_load_is_in_the_log(group: Group) -> None:
    """Two clients, so many entries as were to be, and no error."""
    words = ["bench", "append", "-b", ",".join(group.addresses), "--timeout", "30"]
    before = committed(group)
    shown = CliRunner().invoke(main, [*words, "--records", "2000", "--clients", "2", "--json"])

    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert (told["records"], told["failed"]) == (2000, 0)
    assert 0 < told["latency_ms"]["p50"] <= told["latency_ms"]["p99_9"] <= told["latency_ms"]["max"]
    assert committed(group) - before >= 2000


def test_sent_load_is_in_the_topic(make_brokers: Callable[..., BrokerGroup]) -> None:
    """The broker's queues together have so many messages."""
    broker = make_brokers(size=1, plain=True)
    broker.start_all()
    words = ["bench", "send", "-b", ",".join(broker.addresses), "--timeout", "30", "--topic", "bench"]
    shown = CliRunner().invoke(main, [*words, "--records", "1000", "--size", "64"])

    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("records        1,000 of 64 bytes acknowledged in ")
    with Admin(broker.addresses) as admin:

        def dispatched() -> int:
            return sum(one.max_offset - one.min_offset for one in admin.queue_ranges("bench"))

        wait_until(lambda: dispatched() >= 1000, "the messages are in their queues")
        assert dispatched() == 1000
