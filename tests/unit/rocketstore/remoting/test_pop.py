"""Pop's requests over remoting: headers, check points and bodies are RocketMQ 5's."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any, get_type_hints

import pytest

from dledger.remoting.codes import RequestError
from rocketstore.remoting import pop
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import read_header, write_header
from rocketstore.remoting.pop import (
    AssignmentsBody,
    BatchAckBody,
    CheckPoint,
    PopHeader,
    QueryAssignmentBody,
    QueueAssignment,
    message_offsets,
    order_counts,
    start_offsets,
)
from rocketstore.remoting.topics import MessageQueue
from rocketstore.types import MessageModel, RequestMode

KINDS: dict[str, type[Any]] = {
    name: kind
    for name, kind in vars(pop).items()
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == pop.__name__
    if not issubclass(kind, Body)
}
POINT = CheckPoint(40, 1_795_330_159_425, 60_000, 0, True, "b-1", 3, 42)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_reads_the_same(name: str) -> None:
    """Every header of pop."""
    kind = KINDS[name]
    hints = get_type_hints(kind)
    values: dict[type, object] = {int: 7, str: "text", bool: True}
    full = kind(*[values[hints[one.name]] for one in dataclasses.fields(kind)])
    assert read_header(kind, write_header(full)) == full


def test_a_java_clients_request_is_read() -> None:
    """As RocketMQ 5's Java client writes it: numbers as texts, a Boolean, and an attempt id only sometimes."""
    fields = {
        "consumerGroup": "g",
        "topic": "T",
        "queueId": "-1",
        "maxMsgNums": "32",
        "invisibleTime": "60000",
        "pollTime": "15000",
        "bornTime": "1795330159425",
        "initMode": "1",
        "expType": "TAG",
        "exp": "*",
        "order": "false",
    }
    assert read_header(PopHeader, fields) == PopHeader(
        "g", "T", -1, 32, 60_000, 15_000, 1_795_330_159_425, 1, "TAG", "*"
    )


class TestCheckPoints:
    """The text with which a client names a message."""

    def test_it_has_rocketmqs_eight_places(self) -> None:
        """``start pop-time invisible-time revive-queue retry broker queue offset``."""
        assert str(POINT) == "40 1795330159425 60000 0 1 b-1 3 42"
        assert CheckPoint.parse(str(POINT)) == POINT

    def test_what_the_broker_adds_comes_back(self) -> None:
        """Clients send back the whole text."""
        point = POINT._replace(rest="handle")
        assert CheckPoint.parse(str(point)) == point

    def test_a_number_is_before_what_the_broker_adds(self) -> None:
        """RocketMQ's proxy takes a ninth place for the message's offset in the log, and ignores what is behind."""
        text = str(POINT._replace(log_offset=4711, rest="handle"))
        assert text == f"{POINT} 4711 handle"
        assert str(POINT._replace(log_offset=4711)) == f"{POINT} 4711"
        assert str(POINT._replace(rest="handle")) == f"{POINT} -1 handle"
        assert CheckPoint.parse(f"{POINT} 4711") == POINT._replace(log_offset=4711)
        assert CheckPoint.parse(f"{text} 4711") == CheckPoint.parse(text), "the proxy adds the number once more"

    def test_the_second_kind_of_retry_topic_is_one_too(self) -> None:
        """RocketMQ 5 has two names for them."""
        assert CheckPoint.parse("40 1 2 0 2 b 3 42").is_retry

    @pytest.mark.parametrize("text", ["", "1 2 3", "a 1 2 0 1 b 3 4", f"{1 << 63} 1 2 0 0 b 3 4", "1 " * 5000])
    def test_anything_else_is_refused(self, text: str) -> None:
        """With what is wrong."""
        with pytest.raises(RequestError, match="extraInfo"):
            CheckPoint.parse(text)

    def test_offsets_are_told_by_queue(self) -> None:
        """``retry queue start`` and ``retry queue first,second``, several with semicolons."""
        offsets = {(False, 3): [7, 8], (True, 0): [2]}
        assert start_offsets(offsets) == "0 3 7;1 0 2"
        assert message_offsets(offsets) == "0 3 7,8;1 0 2"
        assert order_counts({(False, 3): 2}) == "0 3 2"


class TestAcksOfMany:
    """BATCH_ACK_MESSAGE, by the names of one letter."""

    def entry(self, **other: object) -> dict[str, object]:
        return {"c": "g", "t": "T", "r": "0", "so": 100, "q": 2, "rq": 0, "pt": 5, "it": 6, "b": "BQE="} | other

    def test_the_bits_are_distances_from_the_first(self) -> None:
        """Java's BitSet as bytes, the lowest first, in base64: 5 and 1 are the bits 0, 2 and 8."""
        body = json.dumps({"brokerName": "b", "acks": [self.entry()]}).encode()
        (entry,) = BatchAckBody.decode(body).acks
        assert list(entry.offsets()) == [100, 102, 108]

    @pytest.mark.parametrize("bits", ["!", "AAA", "A" * 1000 + "/w=="])
    def test_wrong_or_too_many_bits_are_refused(self, bits: str) -> None:
        """Not taken for none: the client would believe that its messages are acknowledged."""
        body = json.dumps({"acks": [self.entry(b=bits)]}).encode()
        (entry,) = BatchAckBody.decode(body).acks
        with pytest.raises(RequestError):
            list(entry.offsets())


def test_assignments_are_as_java_reads_them() -> None:
    """QUERY_ASSIGNMENT and its answer."""
    asked = b'{"clientId":"c","consumerGroup":"g","messageModel":"CLUSTERING","strategyName":"AVG","topic":"T"}'
    assert QueryAssignmentBody.decode(asked) == QueryAssignmentBody("T", "g", "c", "AVG", MessageModel.CLUSTERING)
    answer = AssignmentsBody((QueueAssignment(MessageQueue("T", "b", -1), RequestMode.POP),))
    assert json.loads(answer.encode()) == {
        "messageQueueAssignments": [{"messageQueue": {"topic": "T", "brokerName": "b", "queueId": -1}, "mode": "POP"}]
    }
