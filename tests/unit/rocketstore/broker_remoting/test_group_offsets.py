"""Offsets of many queues over remoting, and the incarnation of the master that keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from dledger.remoting.codes import AnswerCode
from rocketstore.broker.mastership import GroupView
from rocketstore.remoting.codes import OwnCode, RequestCode
from rocketstore.remoting.extensions import CommitGroupOffsets, FetchedOffsets, FetchOffsets, decode_committed
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket, pull_fields
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

SUBSCRIPTION = 4
"""The flag of a pull that contains its subscription."""
QUEUES = [("T", 0), ("T", 1)]


def fetched(client: RemotingSocket) -> FetchedOffsets:
    answer = client.ask(OwnCode.FETCH_OFFSETS, {}, FetchOffsets("g", QUEUES).encode())
    return FetchedOffsets.decode(answer.body, len(QUEUES))


def commit(
    client: RemotingSocket, offsets: Sequence[tuple[str, int, int]], incarnation: int = 0, *, rewind: bool = False
) -> int:
    """The answer's incarnation."""
    answer = client.ask(OwnCode.COMMIT_OFFSETS, {}, CommitGroupOffsets("g", offsets, incarnation, rewind).encode())
    assert answer.code == AnswerCode.SUCCESS
    return decode_committed(answer.body)


def pulled(client: RemotingSocket, offset: int) -> str | None:
    """The incarnation in the answer to a pull."""
    return client.ask(
        RequestCode.PULL_MESSAGE, pull_fields("g", "T", offset, sysFlag=SUBSCRIPTION, subscription="*")
    ).fields.get("incarnation")


def test_many_queues_are_committed_and_fetched_at_once(client: RemotingSocket) -> None:
    """Those without an offset are -1; none goes back unless that is asked for."""
    assert fetched(client).offsets == [-1, -1]
    commit(client, [("T", 0, 2), ("T", 1, 5)])
    commit(client, [("T", 0, 1)])
    assert fetched(client).offsets == [2, 5]
    commit(client, [("T", 0, 1)], rewind=True)
    assert fetched(client).offsets == [1, 5]


def test_offsets_are_not_committed_in_another_incarnation(broker: RemotingHarness, client: RemotingSocket) -> None:
    """The broker may have lost messages since they were read, and have others in their places."""
    client.send()
    read_in = fetched(client).incarnation
    assert pulled(client, 0) == pulled(client, 1) == str(read_in)

    broker.store.incarnation += 1
    assert commit(client, [("T", 0, 1)], read_in) == read_in + 1
    assert fetched(client) == (read_in + 1, [-1, -1])
    assert commit(client, [("T", 0, 1)], read_in + 1) == read_in + 1
    assert fetched(client).offsets == [1, -1]


def test_only_a_master_knows_offsets(broker: RemotingHarness, client: RemotingSocket) -> None:
    """A slave would tell an incarnation in which nothing is stored."""
    broker.become(BrokerRole.SLAVE)
    broker.view = GroupView()
    for code, body in (
        (OwnCode.FETCH_OFFSETS, FetchOffsets("g", QUEUES).encode()),
        (OwnCode.COMMIT_OFFSETS, CommitGroupOffsets("g", [("T", 0, 1)]).encode()),
    ):
        assert client.ask(code, {}, body).code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_what_is_malformed_is_refused(client: RemotingSocket) -> None:
    for code in (OwnCode.FETCH_OFFSETS, OwnCode.COMMIT_OFFSETS):
        assert client.ask(code, {}, b"\xff").code == AnswerCode.SYSTEM_ERROR
