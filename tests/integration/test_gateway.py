"""RocketMQ 5's clients over gRPC on real brokers: any member takes every call, also while the leader is killed."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from rocketstore.message.record import decode_record
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from tests.integration.broker_harness import QUEUES, BrokerGroup
from tests.support.broker_load import TOPIC
from tests.support.gateway_client import GatewayClient, message, producer_settings
from tests.support.waiting import PATIENCE_S, wait_until

ATTEMPTS: Final = 3
"""As the official clients: at once, three times."""
DEADLINE_S: Final = 10.0
"""Of each. Theirs have 3 s, and not the servers' processors to share."""
SENDERS: Final = 4


def dial(group: BrokerGroup, client_id: str, first: str = "") -> GatewayClient:
    """A client of all members, in an order of its own, as a route names them."""
    ports = {node: one.grpc_port for node, one in group.nodes.items()}
    order = sorted(ports, key=lambda node: (node != first, node))
    return GatewayClient("ipv4:" + ",".join(f"127.0.0.1:{ports[node]}" for node in order), client_id, {})


class Load:
    """Senders that repeat as the official clients do; ``errors`` is what an application would see."""

    def __init__(self, group: BrokerGroup) -> None:
        self._group = group
        self._stopping = threading.Event()
        self.acknowledged: list[str] = []
        self.repeated: set[str] = set()
        self.errors: list[str] = []

    def _send(self, number: int) -> None:
        first = list(self._group.nodes)[number % len(self._group.nodes)]
        with dial(self._group, f"sender-{number}", first) as client:
            for at in itertools.count():
                if self._stopping.is_set():
                    return
                self._send_one(client, f"{number}-{at}")

    def _send_one(self, client: GatewayClient, message_id: str) -> None:
        problems = []
        for _ in range(ATTEMPTS):
            try:
                status = client.send(message(message_id.encode(), TOPIC, message_id), timeout_s=DEADLINE_S).status
            except grpc.RpcError as error:
                problems.append(str(error.code()))
            else:
                if status.code == pb.OK:
                    self.acknowledged.append(message_id)
                    return
                problems.append(f"{pb.Code.Name(status.code)}: {status.message}")
            self.repeated.add(message_id)
        self.errors.append(f"{message_id}: {problems}")

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._send, args=(number,)) for number in range(SENDERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()

    def wait_for_acks(self, more: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until so many more messages are acknowledged."""
        wanted = len(self.acknowledged) + more
        wait_until(lambda: len(self.acknowledged) >= wanted, f"{more} more are acknowledged", timeout_s)


def stored_ids(brokers: BrokerGroup) -> Counter[str]:
    """How often each id is in the topic's queues."""
    node = brokers.master()
    records = [one for queue_id in range(QUEUES) for one in brokers.pull_all(node, TOPIC, queue_id)]
    return Counter(decode_record(one).unique_key for one in records)


def test_a_leader_is_killed_under_sends_and_no_client_sees_an_error(brokers: BrokerGroup) -> None:
    """0 errors, and every acknowledged id is found; what is there twice was sent again without an answer."""
    load = Load(brokers)
    with load.running():
        for _ in range(2):
            load.wait_for_acks(200)
            leader = brokers.master()
            brokers.kill(leader)
            brokers.master(other_than=leader)
            load.wait_for_acks(200)
            brokers.start(leader)
            load.wait_for_acks(50)
    assert load.errors == []
    brokers.wait_dispatched()
    stored = stored_ids(brokers)
    assert [one for one in load.acknowledged if not stored[one]] == []
    twice = {one for one, count in stored.items() if count > 1}
    assert twice <= load.repeated


def each_member(brokers: BrokerGroup, act: Callable[[GatewayClient, str], None]) -> None:
    for node, one in brokers.nodes.items():
        with GatewayClient(f"127.0.0.1:{one.grpc_port}", f"client-{node}", {}) as client:
            act(client, node)


def test_every_member_serves_every_call(brokers: BrokerGroup) -> None:
    """Routes, settings, sends and transactions, whether or not it leads."""

    def use(client: GatewayClient, node: str) -> None:
        route = client.route(TOPIC, *(f"127.0.0.1:{one.grpc_port}" for one in brokers.nodes.values()))
        assert route.status.code == pb.OK
        assert len(route.message_queues[0].broker.endpoints.addresses) == len(brokers.nodes)
        assert client.telemetry(producer_settings(TOPIC)).next().status.code == pb.OK
        assert client.heartbeat().code == pb.OK
        assert client.send(message(b"normal", TOPIC, f"normal-{node}")).status.code == pb.OK
        half = client.send(message(b"half", TOPIC, f"half-{node}", pb.TRANSACTION)).entries[0]
        request = pbs.EndTransactionRequest(
            topic=pb.Resource(name=TOPIC),
            message_id=half.message_id,
            transaction_id=half.transaction_id,
            resolution=pb.COMMIT,
        )
        for _ in range(2):
            assert client.call("EndTransaction", request, pbs.EndTransactionResponse).status.code == pb.OK

    each_member(brokers, use)
    brokers.wait_dispatched()
    expected = {f"{kind}-{node}" for node in brokers.nodes for kind in ("normal", "half")}
    assert stored_ids(brokers) == Counter(expected)


def test_a_producer_at_any_member_is_asked_about_its_transaction(make_brokers: Callable[..., BrokerGroup]) -> None:
    """The leader asks it by way of the member at which its stream ends."""
    brokers = make_brokers(settings={"transactionCheckInterval": "300", "transactionTimeOut": "0"})
    brokers.start_all()
    brokers.create_topic()

    def use(client: GatewayClient, node: str) -> None:
        stream = client.telemetry(producer_settings())
        assert stream.next().status.code == pb.OK
        half = client.send(message(b"half", TOPIC, f"half-{node}", pb.TRANSACTION)).entries[0]
        asked = stream.next().recover_orphaned_transaction_command
        assert asked.transaction_id == half.transaction_id
        assert asked.message.system_properties.message_id == f"half-{node}"
        request = pbs.EndTransactionRequest(
            topic=pb.Resource(name=TOPIC),
            message_id=half.message_id,
            transaction_id=half.transaction_id,
            resolution=pb.ROLLBACK,
            source=pb.SOURCE_SERVER_CHECK,
        )
        assert client.call("EndTransaction", request, pbs.EndTransactionResponse).status.code == pb.OK

    each_member(brokers, use)
