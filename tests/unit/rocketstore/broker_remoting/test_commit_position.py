"""A place of the log as offsets of a group that reads the log itself."""

from __future__ import annotations

from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame
from rocketstore.remoting.codes import OwnCode
from rocketstore.remoting.extensions import CommitPosition, decode_reached, encode_reached
from rocketstore.state.changes import OFFSETS_MAX, TopicConfig
from rocketstore.types import BrokerRole, PutMessageStatus, PutResult
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

FAR = 1 << 40
"""Behind all that there is."""


def asked(client: RemotingSocket, position: int, *topics: str) -> Frame:
    return client.ask(OwnCode.COMMIT_POSITION, {}, CommitPosition("g", position, topics or ("T",)).encode())


def commit(client: RemotingSocket, position: int, *topics: str) -> dict[tuple[str, int], int]:
    """The offsets of the queues that have messages."""
    answer = asked(client, position, *topics)
    assert answer.code == AnswerCode.SUCCESS, answer.remark
    return {(topic, queue_id): offset for topic, queue_id, offset in decode_reached(answer.body)}


def test_a_place_is_committed_as_an_offset_of_every_queue(broker: RemotingHarness, client: RemotingSocket) -> None:
    """In each queue the messages whose records begin before that place are consumed; any place will do."""
    for number in range(9):
        client.send("T", b"%d" % number, number % 3)
    heads = [one.head for one in broker.store.log.records]

    assert commit(client, heads[5].offset) == {("T", 0): 2, ("T", 1): 2, ("T", 2): 1}
    assert broker.state.committed == {("g", "T", 0): 2, ("g", "T", 1): 2, ("g", "T", 2): 1}
    assert commit(client, heads[5].offset + 1)["T", 2] == 2


def test_only_the_topics_named_are_committed(broker: RemotingHarness, client: RemotingSocket) -> None:
    """An unknown one is refused, and nothing committed; none at all is a mistake, as is a negative place."""
    broker.state.table["U"] = TopicConfig("U", 1, 1)
    client.send("T", b"1")
    client.send("U", b"2")

    assert commit(client, FAR, "U") == {("U", 0): 1}
    assert asked(client, FAR, "T", "nowhere").code == AnswerCode.TOPIC_NOT_EXIST
    for wrong in (CommitPosition("g", FAR, ()), CommitPosition("g", -1, ("T",))):
        answer = client.ask(OwnCode.COMMIT_POSITION, {}, wrong.encode())
        assert (answer.code, "malformed position" in answer.remark) == (AnswerCode.SYSTEM_ERROR, True)
    assert client.ask(OwnCode.COMMIT_POSITION, {}, b"\xff").code == AnswerCode.SYSTEM_ERROR
    assert broker.state.committed == {("g", "U", 0): 1}


def test_what_is_not_in_the_queues_yet_is_left_for_later(broker: RemotingHarness, client: RemotingSocket) -> None:
    """An offset beyond a queue's end would be refused, or skip messages."""
    broker.store.dispatched_to = 2
    for number in range(4):
        client.send("T", b"%d" % number)

    assert commit(client, FAR) == {("T", 0): 2}


def test_only_what_went_forward_is_written(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Each change is an append to the log; a stream commits every few seconds."""
    client.send("T", b"1", 0)
    client.send("T", b"2", 1)
    second = broker.store.log.records[1].head.offset
    commit(client, second)
    assert broker.state.committed == {("g", "T", 0): 1, ("g", "T", 1): 0}
    broker.state.refusal = PutResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, outcome="not_applied", reason="no")

    commit(client, 0)
    commit(client, second)
    assert asked(client, FAR).code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_many_queues_are_committed_in_parts(broker: RemotingHarness, client: RemotingSocket) -> None:
    """One change of the state holds ``OFFSETS_MAX`` offsets at most."""
    broker.state.table["T"] = TopicConfig("T", 1024, 1024)
    for number in range(1024):
        client.send("T", b"x", number)

    assert len(commit(client, FAR)) == 1024
    assert len(broker.state.committed) == 1024
    assert broker.state.largest_commit <= OFFSETS_MAX


def test_a_slave_commits_nothing(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Its master does."""
    broker.become(BrokerRole.SLAVE)
    assert asked(client, 3).code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_the_wire() -> None:
    """As docs/protocol.md says."""
    body = CommitPosition("g", 258, ("T", "UV")).encode()
    assert body == bytes.fromhex("0000000000000102 01 67 00000002 01 54 02 5556")
    assert CommitPosition.decode(body) == ("g", 258, ["T", "UV"])
    reached = [("T", 1, 7)]
    assert encode_reached(reached) == bytes.fromhex("00000001 01 54 00000001 0000000000000007")
    assert decode_reached(encode_reached(reached)) == reached
