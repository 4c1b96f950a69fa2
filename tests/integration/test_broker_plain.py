"""A broker without DLedger: one process, one directory, and what it acknowledged is there after SIGKILL."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger_cli.local.group import LocalGroupError
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import N0


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_killed_plain_broker_keeps_what_it_acknowledged(make_brokers: Callable[..., BrokerGroup], flush: str) -> None:
    """SYNC_FLUSH: it is on disk. ASYNC_FLUSH: it is in the page cache, which outlives the process."""
    broker = make_brokers(size=1, plain=True, flush=flush)
    broker.start_all()
    broker.create_topic()
    with broker.load() as load:
        for _ in range(2):
            load.history.wait_for_acks(300)
            broker.kill(N0)
            broker.start(N0)
        load.history.wait_for_acks(100)

    broker.verify()


def test_second_broker_on_a_directory_is_refused(make_brokers: Callable[..., BrokerGroup]) -> None:
    """It says who has the directory and ends; the first one does not notice."""
    first, second = [make_brokers(size=1, plain=True) for _ in range(2)]
    first.start_all()
    first.create_topic()

    with pytest.raises(LocalGroupError, match="is in use by process"):
        second.start_all()

    first.create_topic("still-works")
