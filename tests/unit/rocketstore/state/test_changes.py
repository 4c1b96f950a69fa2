"""What a state message says, and what is no state message."""

from __future__ import annotations

import json

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.pop.tables import PopPlace, PopRow
from rocketstore.state.attributes import ExponentialRetryDelays, FixedRetryDelays, TopicRequestMode
from rocketstore.state.changes import (
    Change,
    CommitOffsets,
    DeleteGroup,
    DeleteTopic,
    ExpireMessages,
    FullPart,
    GroupConfig,
    MalformedStateError,
    NewerStateError,
    PopRows,
    PutGroup,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    SetRequestMode,
    StateMessage,
    TopicConfig,
    decode_state,
    encode_change,
    join_changes,
    split_full,
)
from rocketstore.state.tables import Tables
from rocketstore.types import MessageType, RequestMode

CHANGES: tuple[Change, ...] = (
    PutTopic(TopicConfig("Orders", 4, 2, 6)),
    DeleteTopic("%RETRY%group"),
    DeleteTopic("Old", ((0, 7), (3, 0))),
    CommitOffsets("group", (QueueOffset("Orders", 0, 5), QueueOffset("Orders", 1, 0))),
    CommitOffsets("group", (QueueOffset("Orders", 0, 1),), reset=True),
    CommitOffsets("empty", ()),
    DeleteGroup("group"),
    SetDelayOffsets(((1, 7), (18, 0))),
    ExpireMessages("Orders", ((0, 5), (3, 7))),
)
NEWER: tuple[Change, ...] = (
    PutTopic(TopicConfig("Orders", 4, 2, 6, order=True, sys_flag=3)),
    PutGroup(GroupConfig("group", consume_enable=False, retry_queues=0, retry_times_max=-1, broker_id_when_slow=2)),
)


ATTRIBUTES: tuple[Change, ...] = (
    PutTopic(TopicConfig("Orders", 4, 4, message_type=MessageType.FIFO, retention_ms=3_600_000)),
    PutGroup(GroupConfig("group", ordered=True, retry_policy=FixedRetryDelays((1000, 5000)))),
    PutGroup(GroupConfig("other", retry_policy=ExponentialRetryDelays(1000, 60_000, 2))),
)
NEWEST: tuple[Change, ...] = (
    DeleteTopic("Old", ((0, 7),), (QueueOffset("SCHEDULE_TOPIC_XXXX", 2, 9),)),
    PopRows((PopRow(PopPlace("group", "Orders", 0), 1, 5, reserved=9, settled_from=6, settled=0b10),), 4),
    SetRequestMode(TopicRequestMode("Orders", "group", RequestMode.POP, 2)),
    SetRequestMode(TopicRequestMode("Orders", "other", RequestMode.PULL, -1)),
)


def test_changes_come_back_as_they_were_written() -> None:
    body = join_changes(encode_change(change) for change in CHANGES)

    assert decode_state(body) == StateMessage(CHANGES)


def test_attributes_of_topics_and_groups_come_back_as_they_were_written() -> None:
    """The type of messages, the order, and both kinds of retry delays."""
    body = join_changes(encode_change(change) for change in ATTRIBUTES)
    assert decode_state(body) == StateMessage(ATTRIBUTES)
    tables = Tables(ATTRIBUTES)
    assert tuple(Tables(tables.as_changes()).as_changes()) == tuple(tables.as_changes())


@pytest.mark.parametrize(
    "changed",
    [
        {"type": "LITE"},
        {"type": 7},
        {"op": "put_group", "retry_policy": {"delays": []}},
        {"op": "put_group", "retry_policy": {"delays": [1, True]}},
        {"op": "put_group", "retry_policy": {"initial": 5, "max": 4, "multiplier": 2}},
        {"op": "put_group", "retry_policy": {"initial": 5, "max": 9, "multiplier": 0}},
        {"op": "put_group", "retry_policy": []},
        {"op": "request_mode", "topic": "T", "group": "g", "mode": "PUSH", "share": 0},
        {"op": "request_mode", "topic": "T", "group": "g", "mode": "POP", "share": -2},
        {"op": "request_mode", "topic": "T", "group": "g", "mode": "POP"},
    ],
)
def test_attributes_that_nobody_writes_make_the_message_malformed(changed: dict[str, object]) -> None:
    """Else members of different versions would understand different things."""
    whole = ATTRIBUTES[0] if changed.get("op") is None else ATTRIBUTES[1]
    one = json.loads(encode_change(whole).data) | changed
    with pytest.raises(MalformedStateError):
        decode_state(json.dumps({"v": 3, "changes": [one]}).encode())


def test_what_an_older_version_knows_is_written_for_it() -> None:
    """Else a cluster could not be upgraded member by member."""
    old = [encode_change(change) for change in CHANGES]
    assert json.loads(join_changes(old))["v"] == 1
    for change in NEWER:
        body = join_changes([*old, encode_change(change)])
        assert json.loads(body)["v"] == 2
    for change in NEWEST:
        body = join_changes([*old, encode_change(change)])
        assert json.loads(body)["v"] == 3
        assert decode_state(body) == StateMessage((*CHANGES, change))
        assert decode_state(body) == StateMessage((*CHANGES, change))


def test_a_full_state_has_the_settings_of_groups() -> None:
    tables = Tables((*CHANGES[:1], *NEWER, CommitOffsets("plain", ())))
    again = Tables(
        change
        for body in split_full(tables.as_changes(), full_id="a", upto=0, bytes_max=100)
        for change in decode_state(body).changes
    )
    assert (again.group_configs, again.groups, again.topics) == (tables.group_configs, tables.groups, tables.topics)
    again.apply(DeleteGroup("group"))
    assert (again.group_configs, list(again.groups)) == ({}, ["plain"])


def test_a_part_of_a_full_state_says_which_it_is() -> None:
    part = FullPart("id", 1, 3, 42)

    assert decode_state(join_changes([], part)) == StateMessage((), part)


GOOD = {"v": 1, "changes": []}
COMMIT = {"op": "offsets", "group": "g", "offsets": [["T", 0, 1]], "reset": False}
TOPIC = {"op": "put_topic", "name": "T", "read": 1, "write": 1, "perm": 6}
DELETE = {"op": "delete_topic", "name": "a", "ends": []}
FULL = {"id": "a", "part": 0, "parts": 1, "upto": 0}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"v": 1},
        {"changes": []},
        {**GOOD, "v": "1"},
        {**GOOD, "v": True},
        {**GOOD, "v": 0},
        {**GOOD, "more": 1},
        {**GOOD, "changes": {}},
        {**GOOD, "changes": [1]},
        {**GOOD, "changes": [{"op": "unknown"}]},
        {**GOOD, "changes": [{**COMMIT, "more": 1}]},
        {**GOOD, "changes": [{**COMMIT, "group": ""}]},
        {**GOOD, "changes": [{**COMMIT, "group": "a/b"}]},
        {**GOOD, "changes": [{**COMMIT, "group": 1}]},
        {**GOOD, "changes": [{**COMMIT, "reset": 0}]},
        {**GOOD, "changes": [{**COMMIT, "offsets": [["T", 0]]}]},
        {**GOOD, "changes": [{**COMMIT, "offsets": [["T", 0, -1]]}]},
        {**GOOD, "changes": [{**COMMIT, "offsets": [["T", 0, 1.0]]}]},
        {**GOOD, "changes": [{**COMMIT, "offsets": [["T", 70_000, 1]]}]},
        {**GOOD, "changes": [{**COMMIT, "offsets": [["..", 0, 1]]}]},
        {**GOOD, "changes": [{**COMMIT, "offsets": [["T", 0, 1]] * 1025}]},
        {**GOOD, "changes": [{**TOPIC, "read": 0}]},
        {**GOOD, "changes": [{**TOPIC, "write": 2000}]},
        {**GOOD, "changes": [{**TOPIC, "perm": 8}]},
        {**GOOD, "changes": [{**TOPIC, "name": "x" * 128}]},
        {**GOOD, "changes": [{"op": "delay", "offsets": [[0, 1]]}]},
        {**GOOD, "changes": [{**DELETE, "name": "a\n"}]},
        {**GOOD, "changes": [DELETE] * 4097},
        {**GOOD, "full": {**FULL, "part": 1}},
        {**GOOD, "full": {**FULL, "parts": 5000}},
        {**GOOD, "full": {**FULL, "id": ""}},
        {**GOOD, "changes": [{**DELETE, "ends": [[0, -1]]}]},
        {**GOOD, "changes": [{**DELETE, "waits": [["T", 0, -1]]}]},
        {**GOOD, "changes": [{**DELETE, "waits": [[0, 1]]}]},
        {**GOOD, "changes": [{**DELETE, "ends": [[-1, 1]]}]},
        {**GOOD, "full": None},
    ],
)
def test_anything_but_the_exact_shape_is_malformed(value: object) -> None:
    with pytest.raises(MalformedStateError):
        decode_state(json.dumps(value).encode())


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[" * 100_000, b'{"v":1,"changes":[' + b"9" * 5000 + b"]}"])
def test_bytes_that_are_no_json_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedStateError):
        decode_state(body)


def test_a_newer_version_is_told_apart_whatever_else_it_holds() -> None:
    with pytest.raises(NewerStateError):
        decode_state(b'{"v":4,"anything":[]}')


def test_a_topic_with_a_bad_name_cannot_be_named() -> None:
    with pytest.raises(InvalidRequestError):
        TopicConfig("../escape")


def test_a_full_state_in_parts_makes_the_same_tables() -> None:
    tables = Tables()
    tables.apply(SetDelayOffsets(((3, 9),)))
    tables.apply(CommitOffsets("empty", ()))
    for number in range(300):
        tables.apply(PutTopic(TopicConfig(f"T{number}", 1, 1, 6)))
        tables.apply(CommitOffsets("big", tuple(QueueOffset(f"T{number}", queue, number) for queue in range(16))))

    bodies = split_full(tables.as_changes(), full_id="f", upto=7, bytes_max=10_000)
    decoded = [decode_state(body) for body in bodies]

    assert len(bodies) > 5
    assert [one.full for one in decoded] == [FullPart("f", part, len(bodies), 7) for part in range(len(bodies))]
    copy = Tables(change for one in decoded for change in one.changes)
    assert (copy.topics, copy.groups, copy.delay_offsets) == (tables.topics, tables.groups, tables.delay_offsets)


def test_what_waits_for_a_deleted_topic_is_known_until_it_waits_no_longer() -> None:
    """In every copy of the tables; a log that has lost its tail takes the marks back, or it would lose what is new."""
    delayed, other = QueueOffset("SCHEDULE_TOPIC_XXXX", 2, 9), QueueOffset("SCHEDULE_TOPIC_XXXX", 3, 9)
    tables = Tables([PutTopic(TopicConfig("T", 4, 4)), DeleteTopic("T", waits=(delayed,))])
    for copy in (tables, tables.copy(), Tables(tables.as_changes()), tables.mirror(())):
        assert [copy.place_for("T", 1, delayed._replace(offset=at)) for at in (8, 9)] == [None, None]
        copy.apply(PutTopic(TopicConfig("T", 4, 4)))
        assert [copy.place_for("T", 1, delayed._replace(offset=at)) for at in (8, 9)] == [None, 1]
        assert copy.place_for("T", 1, other._replace(offset=0)) == 1
        assert copy.place_for("U", 1, delayed._replace(offset=0)) == 1
    tables.put_back(lambda _topic, _queue: 5)
    assert [tables.place_for("T", 1, delayed._replace(offset=at)) for at in (4, 5)] == [None, 1]
    tables.forget_waits(lambda topic, queue_id, end: (topic, queue_id, end) == delayed._replace(offset=5))
    assert tables.waits == {}


def test_an_empty_state_is_one_part() -> None:
    assert [decode_state(body).full for body in split_full([], full_id="f", upto=0, bytes_max=10)] == [
        FullPart("f", 0, 1, 0)
    ]


def test_offsets_go_back_only_with_a_reset() -> None:
    tables = Tables([CommitOffsets("g", (QueueOffset("T", 0, 9),))])

    tables.apply(CommitOffsets("g", (QueueOffset("T", 0, 4), QueueOffset("T", 1, 4))))
    assert tables.groups["g"] == {("T", 0): 9, ("T", 1): 4}

    tables.apply(CommitOffsets("g", (QueueOffset("T", 0, 4),), reset=True))
    assert tables.groups["g"][("T", 0)] == 4


def test_deleting_a_topic_forgets_the_offsets_in_it() -> None:
    tables = Tables([PutTopic(TopicConfig("T")), CommitOffsets("g", (QueueOffset("T", 0, 9), QueueOffset("U", 0, 1)))])

    tables.apply(DeleteTopic("T"))

    assert tables.topics == {}
    assert tables.groups == {"g": {("U", 0): 1}}
