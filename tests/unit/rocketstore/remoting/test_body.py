"""Records as bodies: members, defaults, numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

import pytest

from dledger.records import record
from dledger.remoting.codes import RequestError
from rocketstore.remoting.body import ITEMS_MAX, TEXT_CHARS_MAX, AtMost, Body, NullableText
from rocketstore.remoting.groups import ConsumerData, HeartbeatData
from rocketstore.remoting.headers import Int32, Int64, Named
from rocketstore.remoting.topics import BrokerData, MessageQueue, QueueData, TopicRouteData
from rocketstore.types import ConsumeType, MessageModel


@record(frozen=True, slots=True)
class Inner(Body):
    """Inside another."""

    name: str


@record(frozen=True, slots=True)
class Sample(Body):
    """One field of each kind."""

    required: str
    number_one: Int32 = 0
    large: Int64 = 0
    truth: bool = False
    rate: float = 0.0
    model: MessageModel = MessageModel.CLUSTERING
    few: Annotated[tuple[str, ...], AtMost(2)] = ()
    inner: Inner | None = None
    by_number: Mapping[Int32, Int64] = field(default_factory=dict)
    by_queue: Annotated[Mapping[MessageQueue, Inner], AtMost(2), Named("byMQ")] = field(default_factory=dict)
    remark: NullableText = ""


FULL = Sample(
    "r",
    -5,
    1 << 40,
    truth=True,
    rate=1.5,
    model=MessageModel.BROADCASTING,
    few=("a", "b"),
    inner=Inner("i"),
    by_number={2: 3, -1: 0},
    by_queue={MessageQueue("t", "b", 1): Inner("q")},
    remark="x",
)


def test_all_members_are_written_by_their_names() -> None:
    """Sorted; enumerations by name; queues as objects."""
    assert FULL.encode() == (
        b'{"byMQ":{{"brokerName":"b","queueId":1,"topic":"t"}:{"name":"q"}},"byNumber":{"-1":0,"2":3},"few":["a","b"],'
        b'"inner":{"name":"i"},"large":1099511627776,"model":"BROADCASTING","numberOne":-5,"rate":1.5,"remark":"x",'
        b'"required":"r","truth":true}'
    )
    assert Sample.decode(FULL.encode()) == FULL


def test_what_is_null_is_left_out_and_missing_members_have_their_defaults() -> None:
    """Empty lists and maps are written."""
    plain = Sample("")
    assert plain.encode() == (
        b'{"byMQ":{},"byNumber":{},"few":[],"large":0,"model":"CLUSTERING","numberOne":0,"rate":0.0,"required":"",'
        b'"truth":false}'
    )
    nulls = ",".join(
        f'"{name}":null' for name in ("numberOne", "large", "truth", "model", "few", "inner", "byMQ", "remark", "rate")
    )
    for text in ('{"required":""}', '{"required":"","unknown":[{}]}', f'{{"required":"",{nulls}}}'):
        assert Sample.decode(text.encode()) == plain


@pytest.mark.parametrize("text", ["{}", '{"required":null}'])
def test_a_required_member_that_is_missing_is_named(text: str) -> None:
    """As Java names a header's."""
    with pytest.raises(RequestError, match="<required> is null"):
        Sample.decode(text.encode())


@pytest.mark.parametrize(
    ("member", "value", "expected"),
    [
        ("numberOne", "2147483647", (1 << 31) - 1),
        ("numberOne", "-2147483648", -1 << 31),
        ("numberOne", '"17"', 17),
        ("large", "9223372036854775807", (1 << 63) - 1),
        ("large", '"-9223372036854775808"', -1 << 63),
        ("truth", "1", True),
        ("truth", "0", False),
        ("truth", '"true"', True),
        ("truth", '"0"', False),
        ("rate", "7", 7.0),
        ("rate", "NaN", 0.0),
        ("model", "0", MessageModel.BROADCASTING),
        ("model", '"CLUSTERING"', MessageModel.CLUSTERING),
        ("remark", "12", "12"),
        ("byMQ", r'{"{\"topic\":\"t\",\"brokerName\":\"b\",\"queueId\":1}":{"name":"q"}}', FULL.by_queue),
        ("byNumber", "{2:3,-1:0}", FULL.by_number),
        ("byNumber", '{"2":null}', {}),
    ],
)
def test_values_in_the_forms_of_other_clients(member: str, value: str, expected: object) -> None:
    """Ordinals, numbers as texts, an object as text, truths as numbers."""
    attribute = {"numberOne": "number_one", "byMQ": "by_queue", "byNumber": "by_number"}.get(member, member)
    found = Sample.decode(f'{{"required":"","{member}":{value}}}'.encode())
    assert getattr(found, attribute) == expected
    assert type(getattr(found, attribute)) is type(expected)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("required", "[]"),
        ("required", "true"),
        ("required", '"' + "x" * (TEXT_CHARS_MAX + 1) + '"'),
        ("numberOne", "2147483648"),
        ("numberOne", "-2147483649"),
        ("numberOne", "1.0"),
        ("numberOne", "true"),
        ("numberOne", '""'),
        ("numberOne", '"1e3"'),
        ("numberOne", '"99999999999999999999"'),
        ("numberOne", "[" * 900 + "]" * 900),
        ("large", "9223372036854775808"),
        ("truth", "2"),
        ("truth", "1.0"),
        ("truth", '"yes"'),
        ("truth", "[]"),
        ("truth", "{}"),
        ("rate", '"1"'),
        ("rate", "1e999"),
        ("rate", "1" + "0" * 400),
        ("model", "2"),
        ("model", "-1"),
        ("model", "true"),
        ("model", '"clustering"'),
        ("model", "[]"),
        ("few", "{}"),
        ("few", '"a"'),
        ("few", '["a","b","c"]'),
        ("few", "[null]"),
        ("inner", "[]"),
        ("inner", "{}"),
        ("byNumber", "[]"),
        ("byNumber", '{"x":1}'),
        ("byNumber", '{"2147483648":1}'),
        ("byMQ", '{"x":{"name":""}}'),
        ("byMQ", '{"{}":{"name":""}}'),
        ("byMQ", '{"[]":{"name":""}}'),
        ("byMQ", "{{topic:1}:{}}"),
        ("byMQ", '{"1":{},"2":{},"3":{}}'),
    ],
)
def test_values_of_another_kind_are_refused(member: str, value: str) -> None:
    """With the member's name where it is its value that is wrong."""
    with pytest.raises(RequestError, match="malformed body"):
        Sample.decode(
            f'{{"required":"","{member}":{value}}}'.replace('"required":"",', "", member == "required").encode()
        )


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"7", b'"a"', b"{", b"\xff"])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    """An empty body too."""
    with pytest.raises(RequestError):
        Sample.decode(data)


def test_lists_and_maps_are_bounded_where_nothing_is_said() -> None:
    """Also where the text is not too long."""
    many = ",".join(['""'] * (ITEMS_MAX + 1))
    with pytest.raises(RequestError, match="at most"):
        TopicRouteData.decode(f'{{"filterServerTable":{{"a":[{many}]}}}}'.encode())


def test_a_route_is_written_as_clients_read_it() -> None:
    """Go cuts ``brokerAddrs`` at commas and colons."""
    route = TopicRouteData(
        (QueueData("b", 4, 4, 6),), (BrokerData("c", "b", {1: "h:2", 0: "h:1"}),), order_topic_conf="b:4"
    )
    assert route.encode() == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"h:1","1":"h:2"},"brokerName":"b","cluster":"c"}],"filterServerTable":{},'
        b'"orderTopicConf":"b:4","queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,"topicSysFlag":0,'
        b'"writeQueueNums":4}]}'
    )
    old = route.encode().replace(b'"0":', b"0:").replace(b'"1":', b"1:")
    assert TopicRouteData.decode(old) == TopicRouteData.decode(route.encode()) == route


def test_a_heartbeat_with_nothing_but_names() -> None:
    """What is missing is what Java's own object has."""
    heartbeat = HeartbeatData.decode(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":0}]}')
    assert heartbeat == HeartbeatData("c", (), (ConsumerData("g", ConsumeType.CONSUME_ACTIVELY),))
    with pytest.raises(RequestError, match="<clientID> is null"):
        HeartbeatData.decode(b"{}")
