"""Transactions at two groups of brokers of real services, behind a real name server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dledger.errors import ConfigError, UnavailableError
from rocketstore.client.cluster_transactions import ClusterTransactionalProducer
from rocketstore.client.errors import NotFoundError
from rocketstore.client.transactions import PreparedMessage, TransactionEnd, TransactionState
from rocketstore.message.message import Message
from rocketstore.nameserver.errors import NameServerError
from rocketstore.types import OP_TOPIC, BrokerRole
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness
from tests.unit.rocketstore.broker_remoting.test_transactions import SOON, stored
from tests.unit.rocketstore.client.test_transactional_producer import Ledger, bodies, saying
from tests.unit.rocketstore.nameserver.wire import Caller, calling, config_in, running

COMMIT, ROLLBACK, UNKNOWN = TransactionState


@dataclass(frozen=True)
class Cluster:
    """Groups ``a`` and ``b``, both with topic T."""

    server: str
    caller: Caller
    brokers: dict[str, RemotingHarness]

    def join(self, name: str) -> None:
        """A group's master registers."""
        self.caller.register(0, self.brokers[name].address, name=name, topics=("T",), queues=4)

    def ends(self) -> int:
        """Of all transactions, at both."""
        return sum(len(bodies(one, OP_TOPIC)) for one in self.brokers.values())

    def bodies(self) -> list[bytes]:
        """What both deliver."""
        return sorted(body for one in self.brokers.values() for body in bodies(one))


@contextmanager
def cluster_in(directory: Path, *names: str) -> Iterator[Cluster]:
    """These groups have registered."""
    with ExitStack() as stack:
        brokers = {name: stack.enter_context(RemotingHarness(SOON)) for name in ("a", "b")}
        server = stack.enter_context(running(config_in(directory)))
        found = Cluster(server.address, stack.enter_context(calling(server)), brokers)
        for name in names:
            found.join(name)
        yield found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_in(tmp_path, "a", "b") as found:
        yield found


def producer(cluster: Cluster, ledger: Ledger | None = None, timeout_s: float = 15.0) -> ClusterTransactionalProducer:
    return ClusterTransactionalProducer(
        cluster.server, group="producers", check=(ledger or Ledger()).check, timeout_s=timeout_s
    )


def test_transactions_are_spread_and_end_where_they_began(cluster: Cluster) -> None:
    """Those that are left open are asked about at both."""
    ledger = Ledger(COMMIT)
    with producer(cluster, ledger) as sender:
        states = [COMMIT, ROLLBACK, UNKNOWN, COMMIT] * 4
        receipts = [
            sender.send_in_transaction(Message("T", b"%02d" % number), saying(state))
            for number, state in enumerate(states)
        ]
        wait_until(lambda: cluster.ends() == 16, "all have ended")
    assert {one.end for one in receipts} == {TransactionEnd.ENDED, TransactionEnd.OPEN}
    assert cluster.bodies() == [b"%02d" % number for number in range(16) if number % 4 != 1]
    assert all(bodies(one) for one in cluster.brokers.values())


def test_a_producer_that_only_answers_is_asked_by_every_group(cluster: Cluster) -> None:
    """Though it has sent nothing there."""
    with producer(cluster) as first:
        for name in cluster.brokers:
            first.send_in_transaction(Message("T", name.encode()), saying(UNKNOWN), queue_id=0, broker_name=name)
    with producer(cluster, Ledger(COMMIT)):
        wait_until(lambda: cluster.bodies() == [b"a", b"b"], "both are committed")


def test_a_group_without_master_is_passed_over_and_nothing_is_executed_twice(cluster: Cluster) -> None:
    """What was not prepared is prepared elsewhere; an error of the callback is the caller's alone."""
    called: list[str] = []

    def execute(prepared: PreparedMessage) -> TransactionState:
        called.append(prepared.transaction_id)
        raise UnavailableError("of the application's own database")

    cluster.brokers["a"].become(BrokerRole.SLAVE)
    with producer(cluster, timeout_s=1.0) as sender:
        for _ in range(2):
            assert sender.send_in_transaction(Message("T", b"x"), saying(COMMIT)).end is TransactionEnd.ENDED
        with pytest.raises(UnavailableError, match="own database"):
            sender.send_in_transaction(Message("T", b"y"), execute)
    assert len(called) == 1
    assert bodies(cluster.brokers["b"]) == [b"x", b"x"]


def test_groups_that_come_later_are_joined_with_the_topic(tmp_path: Path) -> None:
    """With the next message to it, also at groups that did not get that message."""
    with cluster_in(tmp_path, "a") as cluster:
        other = cluster.brokers["b"].groups.clients
        with producer(cluster) as sender:
            sender.send_in_transaction(Message("T", b"x"), saying(COMMIT))
            cluster.join("b")
            sender._routes._known.clear()
            sender.send_in_transaction(Message("T", b"y"), saying(COMMIT), queue_id=0, broker_name="a")
            wait_until(lambda: "producers" in other.producer_groups(), "it has joined there")


def test_a_group_that_must_not_be_connected_to_keeps_no_message_from_the_others(cluster: Cluster) -> None:
    """Its address needs TLS."""
    with producer(cluster) as sender:
        cluster.caller.register(0, "192.0.2.1:10911", name="c", topics=("T",), queues=4)
        for name in cluster.brokers:
            receipt = sender.send_in_transaction(
                Message("T", name.encode()), saying(COMMIT), queue_id=0, broker_name=name
            )
            assert receipt.end is TransactionEnd.ENDED
    assert cluster.bodies() == [b"a", b"b"]


def test_a_group_that_must_not_be_connected_to_does_not_keep_a_producer_from_starting(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named. If there is no other group, starting fails: nobody could be asked about anything."""
    cluster.caller.register(0, "192.0.2.1:10911", name="0-far", topics=("T",), queues=4)
    with producer(cluster) as sender:
        receipt = sender.send_in_transaction(Message("T", b"x"), saying(COMMIT), queue_id=0, broker_name="b")
        assert receipt.end is TransactionEnd.ENDED
    assert [one.args[1] for one in caplog.records if one.args and "not joined" in one.msg] == ["0-far"]  # type: ignore[index]


def test_a_producer_that_may_connect_to_no_group_is_not_started(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster:
        cluster.caller.register(0, "192.0.2.1:10911", name="far", topics=("T",), queues=4)
        with pytest.raises(ConfigError, match="insecure"), producer(cluster):
            pytest.fail("it has started")


def test_keys_and_errors_are_those_of_a_cluster_producer(cluster: Cluster) -> None:
    with producer(cluster) as sender:
        for _ in range(4):
            sender.send_in_transaction(Message("T", b"k"), saying(COMMIT), key="17")
        stored_by = [{one.queue_id for one in stored(each, "T")} for each in cluster.brokers.values()]
        assert sorted(map(len, stored_by)) == [0, 1]
        with pytest.raises(NotFoundError):
            sender.send_in_transaction(Message("unknown", b"k"), saying(COMMIT))
    with pytest.raises(UnavailableError, match="closed"):
        sender.send_in_transaction(Message("T", b"k"), saying(COMMIT))


def test_name_servers_that_do_not_answer_are_named() -> None:
    nobody = ClusterTransactionalProducer("127.0.0.1:1", group="g", check=saying(UNKNOWN), timeout_s=0.3)
    with pytest.raises(NameServerError), nobody:
        pytest.fail("it has started")
