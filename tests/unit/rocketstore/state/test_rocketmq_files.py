"""The files of RocketMQ's own brokers: taken over, taken over again, and written for the way back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dledger.store.fs import FileSystem
from rocketstore.state.applier import SNAPSHOT_FILE, BrokerSnapshot, read_snapshot, write_snapshot
from rocketstore.state.attributes import ExponentialRetryDelays
from rocketstore.state.changes import (
    OFFSETS_MAX,
    CommitOffsets,
    DeleteTopic,
    GroupConfig,
    PutGroup,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    TopicConfig,
)
from rocketstore.state.rocketmq_files import (
    RocketmqFiles,
    edited_by_hand,
    newer_changes,
    once_replaced,
    read_rocketmq_files,
)
from rocketstore.state.tables import Tables
from rocketstore.types import MessageType
from tests.crash.crash_fs import NO_SPACE, FailingFs
from tests.unit.rocketstore.state.conftest import Member

NAMES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json")
KNOWN = (
    DeleteTopic("Gone", ((0, 5),)),
    PutTopic(TopicConfig("Orders")),
    CommitOffsets("readers", (QueueOffset("Orders", 0, 10),)),
    SetDelayOffsets(((2, 4),)),
)
TABLES = Tables(KNOWN)


def read(directory: Path, name: str) -> Any:  # noqa: ANN401  # JSON
    return json.loads((directory / name).read_text())


def write(directory: Path, tables: Tables = TABLES) -> None:
    RocketmqFiles(FileSystem(), directory).write(tables, 1000)


def as_rocketmq_writes(directory: Path, name: str, content: dict[str, Any]) -> Path:
    """Without our mark."""
    path = directory / name
    path.write_text(json.dumps(content))
    return path


# --- reading ---------------------------------------------------------------------------------------------------------


def test_rocketmq_files_are_taken_over(tmp_path: Path) -> None:
    """Topics, groups, offsets; what cannot be here is left out."""
    topics = {
        "dataVersion": {"counter": 1, "timestamp": 2},
        "topicConfigTable": {
            "Orders": {"perm": 6, "readQueueNums": 8, "topicName": "Orders", "writeQueueNums": 4, "order": False},
            "Odd": {"perm": 6, "readQueueNums": 0, "topicName": "Odd", "writeQueueNums": 0},
            "RMQ_SYS_BROKER_STATE": {"perm": 6, "readQueueNums": 1, "writeQueueNums": 1},
        },
    }
    (tmp_path / "topics.json").write_text(json.dumps(topics))
    (tmp_path / "subscriptionGroup.json").write_text('{"subscriptionGroupTable":{"idle":{"groupName":"idle"}}}')
    (tmp_path / "consumerOffset.json").write_text('{\n\t"offsetTable":{"Orders@readers":{0:17,1:5\n\t\t}\n\t}\n}')
    (tmp_path / "delayOffset.json").write_text('{"offsetTable":{1:3,"2":4}}')

    tables = Tables(read_rocketmq_files(tmp_path).changes)

    assert tables.topics == {"Orders": TopicConfig("Orders", 8, 4, 6)}
    assert tables.groups == {"idle": {}, "readers": {("Orders", 0): 17, ("Orders", 1): 5}}
    assert tables.delay_offsets == {1: 3, 2: 4}


def test_what_somebody_has_edited_by_hand_is_news_once(tmp_path: Path) -> None:
    """The file has our mark, but not our contents; its layout says nothing. In a group, it is only told."""
    write(tmp_path)
    assert (newer_changes(tmp_path, {}, KNOWN, edits=True), edited_by_hand(tmp_path)) == (None, [])
    path, content = tmp_path / "consumerOffset.json", read(tmp_path, "consumerOffset.json")
    path.write_text(json.dumps(content))
    assert (newer_changes(tmp_path, {}, KNOWN, edits=True), edited_by_hand(tmp_path)) == (None, [])

    content["offsetTable"]["Orders@readers"]["0"] = 3
    path.write_text(json.dumps(content))

    assert edited_by_hand(tmp_path) == ["consumerOffset.json"]
    assert newer_changes(tmp_path, {}, KNOWN) is None
    found = newer_changes(tmp_path, {}, KNOWN, edits=True)
    assert found is not None
    tables = Tables(found.changes)
    assert tables.groups == {"readers": {("Orders", 0): 3}}
    assert newer_changes(tmp_path, found.sums, found.changes, edits=True) is None
    write(tmp_path, tables)
    assert edited_by_hand(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"offsetTable":{"T@g":{"0":-5}}}',
        '{"offsetTable":{"T@g":3}}',
        '{"offsetTable":{"T@g":{"0":Infinity}}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_such_file_is_left_out(tmp_path: Path, text: str) -> None:
    """The others are taken over."""
    (tmp_path / "consumerOffset.json").write_text(text)
    (tmp_path / "delayOffset.json").write_text('{"offsetTable":{"2":4}}')

    assert read_rocketmq_files(tmp_path).changes == (SetDelayOffsets(((2, 4),)),)


@pytest.mark.parametrize("bad", ["-1", "-5", "8.5", "null", '"x"', "true", "{}", str(1 << 70)])
def test_one_bad_offset_leaves_all_others(tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    """RocketMQ's brokers store what clients commit; Go's ordered consumer commits -1 for a queue without messages."""
    (tmp_path / "consumerOffset.json").write_text(
        f'{{"offsetTable":{{"t@sound":{{0:7,1:9}},"t@other":{{0:{bad},1:3}},"bad topic@g":{{0:1}},"u@sound":{{2:4}}}}}}'
    )

    found = Tables(read_rocketmq_files(tmp_path).changes).groups

    assert found == {"sound": {("t", 0): 7, ("t", 1): 9, ("u", 2): 4}, "other": {("t", 1): 3}}
    assert "offset of group other in t, queue 0: " in caplog.text
    assert "bad topic" in caplog.text


def test_one_bad_offset_of_very_many_leaves_all_others(tmp_path: Path) -> None:
    """More than one change may hold."""
    offsets = {str(number): number or -1 for number in range(2 * OFFSETS_MAX)}
    (tmp_path / "consumerOffset.json").write_text(json.dumps({"offsetTable": {"Orders@readers": offsets}}))

    noted = Tables(read_rocketmq_files(tmp_path).changes).groups["readers"]

    assert noted == {("Orders", number): number for number in range(1, 2 * OFFSETS_MAX)}


def test_many_bad_values_are_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a few of them named and the others counted."""
    offsets = {str(number): -1 for number in range(1003)}
    (tmp_path / "consumerOffset.json").write_text(json.dumps({"offsetTable": {"Orders@readers": offsets}}))

    read_rocketmq_files(tmp_path)

    (line,) = caplog.messages
    assert "offset of group readers in Orders, queue 0: -1, which is none" in line
    assert line.endswith("and 1,000 more")


@pytest.mark.parametrize("bad", ["-1", "null", '"x"', "{}"])
def test_one_bad_progress_of_a_delay_level_leaves_all_others(tmp_path: Path, bad: str) -> None:
    (tmp_path / "delayOffset.json").write_text(f'{{"offsetTable":{{1:3,2:{bad},999:1,"x":1,4:5}}}}')

    assert read_rocketmq_files(tmp_path).changes == (SetDelayOffsets(((1, 3), (4, 5))),)


@pytest.mark.parametrize("odd", [None, {}, {"perm": 6}, {"perm": 6, "readQueueNums": None, "writeQueueNums": 4}, []])
def test_one_bad_topic_leaves_all_others(tmp_path: Path, odd: object, caplog: pytest.LogCaptureFixture) -> None:
    sound = {"perm": 6, "readQueueNums": 8, "writeQueueNums": 4}
    (tmp_path / "topics.json").write_text(json.dumps({"topicConfigTable": {"Odd": odd, "Sound": sound}}))

    assert read_rocketmq_files(tmp_path).changes == (PutTopic(TopicConfig("Sound", 8, 4, 6)),)
    assert "topic Odd" in caplog.text


@pytest.mark.parametrize("odd", [None, [], {"consumeEnable": None}, {"retryMaxTimes": "x"}, {"brokerId": -1}])
def test_one_bad_group_leaves_all_others_and_itself_with_the_default_settings(tmp_path: Path, odd: object) -> None:
    """And what was taken over can be read again: one value must not make the whole snapshot useless."""
    sound = {"retryMaxTimes": 3}
    table = {"odd": odd, "sound": sound, "no name": sound}
    (tmp_path / "subscriptionGroup.json").write_text(json.dumps({"subscriptionGroupTable": table}))

    changes = read_rocketmq_files(tmp_path).changes
    write_snapshot(FileSystem(), tmp_path, BrokerSnapshot(changes))

    assert Tables(changes).groups.keys() == {"odd", "sound"}
    assert Tables(changes).group_configs == {"sound": GroupConfig("sound", retry_times_max=3)}
    assert read_snapshot(tmp_path) == BrokerSnapshot(changes)


@pytest.mark.parametrize("number", [8.0, 8.5, True])
def test_what_is_taken_over_can_be_read_again(number: float, tmp_path: Path) -> None:
    """A topic whose numbers are none is left out: a snapshot with it would be of no use, with all that is in it."""
    odd = {"perm": 6, "readQueueNums": number, "writeQueueNums": 8}
    sound = {"perm": 6, "readQueueNums": 8, "writeQueueNums": 4}
    (tmp_path / "topics.json").write_text(json.dumps({"topicConfigTable": {"Odd": odd, "Sound": sound}}))

    changes = read_rocketmq_files(tmp_path).changes
    write_snapshot(FileSystem(), tmp_path, BrokerSnapshot(changes))

    assert changes == (PutTopic(TopicConfig("Sound", 8, 4, 6)),)
    assert read_snapshot(tmp_path) == BrokerSnapshot(changes)


def test_a_file_of_any_length_is_left_out(tmp_path: Path) -> None:
    """Nobody asks for the memory that a hole of a terabyte would take."""
    (tmp_path / "topics.json").touch()
    os.truncate(tmp_path / "topics.json", 1 << 40)

    assert read_rocketmq_files(tmp_path).changes == ()


def test_numbers_in_names_are_left_alone(tmp_path: Path) -> None:
    """Only keys that are numbers are quoted."""
    (tmp_path / "consumerOffset.json").write_text('{"offsetTable":{"a,1:@g":{0:17}, "T@g2":{"0":1}}}')

    # no such topic as the first can be, so its name was read as it is
    assert read_rocketmq_files(tmp_path).changes == (CommitOffsets("g2", (QueueOffset("T", 0, 1),)),)


@pytest.mark.parametrize("damage", ["missing", "empty", "torn"])
def test_the_backup_counts_where_the_file_is_lost(tmp_path: Path, damage: str) -> None:
    """RocketMQ's writer removes the file before it puts the new one in its place, and may be killed in between."""
    (tmp_path / "consumerOffset.json.bak").write_text('{"offsetTable":{"T@g":{0:17}}}')
    if damage != "missing":
        (tmp_path / "consumerOffset.json").write_text({"empty": "", "torn": '{"offsetTable":{"T@g":{0:1'}[damage])

    assert read_rocketmq_files(tmp_path).changes == (CommitOffsets("g", (QueueOffset("T", 0, 17),)),)


def test_our_own_files_are_not_taken_over(tmp_path: Path) -> None:
    """The log is the truth; what was written out of it is older than it."""
    write(tmp_path)

    assert read_rocketmq_files(tmp_path).changes == ()


# --- writing ---------------------------------------------------------------------------------------------------------


def test_what_is_written_says_what_rocketmqs_own_files_say(tmp_path: Path) -> None:
    """All four, with the fields that its brokers need."""
    write(tmp_path)

    topic = read(tmp_path, "topics.json")["topicConfigTable"]["Orders"]
    assert (topic["perm"], topic["readQueueNums"], topic["writeQueueNums"], topic["topicName"]) == (6, 8, 8, "Orders")
    assert topic["topicFilterType"] == "SINGLE_TAG"
    group = read(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]["readers"]
    assert (group["groupName"], group["consumeEnable"], group["retryMaxTimes"]) == ("readers", True, 16)
    assert read(tmp_path, "consumerOffset.json")["offsetTable"] == {"Orders@readers": {"0": 10}}
    assert read(tmp_path, "delayOffset.json")["offsetTable"] == {"2": 4}


def test_settings_of_topics_and_groups_come_over_and_go_back(tmp_path: Path) -> None:
    ordered = {
        "perm": 6,
        "readQueueNums": 4,
        "writeQueueNums": 4,
        "topicName": "Orders",
        "order": True,
        "topicSysFlag": 1,
    }
    slow = {"groupName": "readers", "retryMaxTimes": 3, "consumeEnable": False, "retryQueueNums": 2}
    as_rocketmq_writes(tmp_path, "topics.json", {"topicConfigTable": {"Orders": ordered}})
    as_rocketmq_writes(tmp_path, "subscriptionGroup.json", {"subscriptionGroupTable": {"readers": slow}})
    tables = Tables(read_rocketmq_files(tmp_path).changes)
    assert tables.topics["Orders"] == TopicConfig("Orders", 4, 4, 6, order=True, sys_flag=1)
    assert tables.group_configs["readers"] == GroupConfig(
        "readers", consume_enable=False, retry_queues=2, retry_times_max=3
    )

    tables.apply(PutTopic(TopicConfig("Orders", 4, 4, 6)))
    tables.apply(PutGroup(GroupConfig("readers")))
    RocketmqFiles(FileSystem(), tmp_path).write(tables, 1000)

    topic = read(tmp_path, "topics.json")["topicConfigTable"]["Orders"]
    assert (topic["order"], topic["topicSysFlag"]) == (False, 0)
    group = read(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]["readers"]
    assert (group["retryMaxTimes"], group["consumeEnable"], group["retryQueueNums"]) == (16, True, 1)


def test_attributes_of_rocketmq_5_come_over_and_go_back(tmp_path: Path) -> None:
    """A topic's type, the order and the retry policy of a group; other attributes are kept."""
    known = {"perm": 6, "readQueueNums": 4, "writeQueueNums": 4, "topicName": "Orders"}
    known |= {"attributes": {"message.type": "FIFO", "cleanup.policy": "DELETE"}}
    policy = {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 1000, "max": 9000, "multiplier": 2}}
    group = {"groupName": "readers", "consumeMessageOrderly": True, "groupRetryPolicy": policy}
    as_rocketmq_writes(tmp_path, "topics.json", {"topicConfigTable": {"Orders": known}})
    as_rocketmq_writes(tmp_path, "subscriptionGroup.json", {"subscriptionGroupTable": {"readers": group}})
    tables = Tables(read_rocketmq_files(tmp_path).changes)
    delays = ExponentialRetryDelays(1000, 9000, 2)
    assert tables.topics["Orders"] == TopicConfig("Orders", 4, 4, 6, message_type=MessageType.FIFO)
    assert tables.group_configs["readers"] == GroupConfig("readers", ordered=True, retry_policy=delays)

    files = RocketmqFiles(FileSystem(), tmp_path)
    files.write(tables, 1000)
    assert read(tmp_path, "topics.json")["topicConfigTable"]["Orders"]["attributes"] == known["attributes"]
    written = read(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]["readers"]
    assert (written["consumeMessageOrderly"], written["groupRetryPolicy"]) == (True, policy)

    tables.apply(PutTopic(TopicConfig("Orders", 4, 4, 6)))
    tables.apply(PutGroup(GroupConfig("readers")))
    files.write(tables, 2000)
    assert read(tmp_path, "topics.json")["topicConfigTable"]["Orders"]["attributes"] == {"cleanup.policy": "DELETE"}
    written = read(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]["readers"]
    assert (written["consumeMessageOrderly"], written.get("groupRetryPolicy")) == (False, None)


def test_what_has_no_place_here_is_kept_for_the_way_back(tmp_path: Path) -> None:
    """A topic's filter type, a topic that is impossible here, the settings of a group that was given none here."""
    odd = {"perm": 6, "readQueueNums": 0, "writeQueueNums": 0, "topicName": "Odd"}
    ordered = {
        "perm": 6,
        "readQueueNums": 4,
        "writeQueueNums": 4,
        "topicName": "Orders",
        "topicFilterType": "MULTI_TAG",
    }
    slow = {"groupName": "readers", "retryMaxTimes": 3, "consumeEnable": False}
    as_rocketmq_writes(tmp_path, "topics.json", {"topicConfigTable": {"Odd": odd, "Orders": ordered, "Old": ordered}})
    as_rocketmq_writes(tmp_path, "subscriptionGroup.json", {"subscriptionGroupTable": {"readers": slow}})

    write(tmp_path)

    topics = read(tmp_path, "topics.json")["topicConfigTable"]
    assert topics["Odd"] == odd
    assert topics["Orders"]["topicFilterType"] == "MULTI_TAG"
    assert "Old" not in topics
    group = read(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]["readers"]
    assert (group["retryMaxTimes"], group["consumeEnable"], group["consumeBroadcastEnable"]) == (3, False, True)


def test_a_file_that_would_say_the_same_is_not_written(tmp_path: Path) -> None:
    """And one that is replaced stays as its backup."""
    files = RocketmqFiles(FileSystem(), tmp_path)
    files.write(TABLES, 1000)
    before = {name: (tmp_path / name).stat().st_ino for name in NAMES}
    changed = TABLES.copy()
    changed.apply(CommitOffsets("readers", (QueueOffset("Orders", 0, 11),)))
    files.write(changed, 2000)

    same = {name for name in NAMES if (tmp_path / name).stat().st_ino == before[name]}
    assert same == set(NAMES) - {"consumerOffset.json"}
    assert read(tmp_path, "consumerOffset.json.bak")["offsetTable"] == {"Orders@readers": {"0": 10}}


def test_a_file_that_found_no_room_is_written_with_the_next_ones(tmp_path: Path) -> None:
    """Also if nothing in it has changed since: what is there is the one before, or none."""
    fs = FailingFs(lambda call, path: NO_SPACE if call == "write" and "consumerOffset" in path else None)
    files = RocketmqFiles(fs, tmp_path)
    with pytest.raises(OSError, match="No space left"):
        files.write(TABLES, 1000)
    fs.fails = lambda _call, _path: None

    files.write(TABLES, 2000)

    assert read(tmp_path, "consumerOffset.json")["offsetTable"] == {"Orders@readers": {"0": 10}}


# --- RocketMQ in between ---------------------------------------------------------------------------------------------


def test_what_rocketmq_wrote_since_replaces_what_was_known_of_it(tmp_path: Path) -> None:
    """File by file: offsets may go back there, and topics may be deleted."""
    write(tmp_path)
    as_rocketmq_writes(tmp_path, "consumerOffset.json", {"offsetTable": {"Orders@readers": {"0": 7}}})
    as_rocketmq_writes(
        tmp_path, "topics.json", {"topicConfigTable": {"New": {"perm": 6, "readQueueNums": 1, "writeQueueNums": 1}}}
    )

    newer = newer_changes(tmp_path, {}, KNOWN)

    assert newer is not None
    tables = Tables(newer.changes)
    assert list(tables.topics) == ["New"]
    assert tables.groups == {"readers": {("Orders", 0): 7}}
    assert tables.delay_offsets == {2: 4}
    assert tables.begins == {"Gone": {0: 5}}


def test_a_newer_list_of_groups_leaves_their_offsets(tmp_path: Path) -> None:
    """It says which groups there are, and nothing of how far they have consumed."""
    write(tmp_path)
    as_rocketmq_writes(tmp_path, "subscriptionGroup.json", {"subscriptionGroupTable": {"readers": {}, "new": {}}})

    newer = newer_changes(tmp_path, {}, KNOWN)

    assert newer is not None
    assert Tables(newer.changes).groups == {"readers": {("Orders", 0): 10}, "new": {}}


def test_a_newer_backup_counts_where_its_file_is_lost(tmp_path: Path) -> None:
    """RocketMQ was killed between the two."""
    as_rocketmq_writes(tmp_path, "consumerOffset.json.bak", {"offsetTable": {"Orders@readers": {"0": 12}}})

    newer = newer_changes(tmp_path, {}, KNOWN)

    assert newer is not None
    assert Tables(newer.changes).groups == {"readers": {("Orders", 0): 12}}


def test_a_backup_that_was_there_at_the_take_over_is_no_news_when_its_file_is_deleted(tmp_path: Path) -> None:
    """By hand: the log counts. Neither the one of RocketMQ's file, nor that file itself once ours has replaced it. If
    RocketMQ has written since, or somebody puts the backup in the file's place, that is meant."""
    name, backup = "consumerOffset.json", "consumerOffset.json.bak"
    as_rocketmq_writes(tmp_path, backup, {"offsetTable": {"Orders@readers": {"0": 3}}})
    as_rocketmq_writes(tmp_path, name, {"offsetTable": {"Orders@readers": {"0": 5}}})
    taken = read_rocketmq_files(tmp_path).sums
    assert list(taken) == [name, backup]
    before = (tmp_path / backup).read_bytes()

    (tmp_path / name).write_text("torn")
    assert newer_changes(tmp_path, taken, KNOWN) is None
    (tmp_path / name).unlink()
    assert newer_changes(tmp_path, taken, KNOWN) is None
    (tmp_path / name).write_bytes(before)
    assert newer_changes(tmp_path, taken, KNOWN) is not None

    as_rocketmq_writes(tmp_path, name, {"offsetTable": {"Orders@readers": {"0": 5}}})
    write(tmp_path)
    (tmp_path / name).unlink()
    for known in (taken, once_replaced(taken), once_replaced(once_replaced(taken))):
        assert newer_changes(tmp_path, known, KNOWN) is None
    as_rocketmq_writes(tmp_path, backup, {"offsetTable": {"Orders@readers": {"0": 12}}})
    newer = newer_changes(tmp_path, once_replaced(taken), KNOWN)
    assert newer is not None
    assert Tables(newer.changes).groups == {"readers": {("Orders", 0): 12}}


def test_offsets_of_very_many_queues_are_taken_over(tmp_path: Path) -> None:
    """More than one change may hold."""
    offsets = {str(number): number for number in range(2 * OFFSETS_MAX + 1)}
    (tmp_path / "consumerOffset.json").write_text(json.dumps({"offsetTable": {"Orders@readers": offsets}}))

    noted = Tables(read_rocketmq_files(tmp_path).changes).groups["readers"]

    assert noted == {("Orders", number): number for number in range(2 * OFFSETS_MAX + 1)}


def test_groups_without_offsets_stay_though_newer_offsets_name_only_others(tmp_path: Path) -> None:
    """The offsets say nothing of which groups there are."""
    known = (*KNOWN, CommitOffsets("idle", ()))
    as_rocketmq_writes(tmp_path, "consumerOffset.json", {"offsetTable": {"Orders@readers": {"0": 12}}})

    newer = newer_changes(tmp_path, {}, known)

    assert newer is not None
    assert Tables(newer.changes).groups == {"readers": {("Orders", 0): 12}, "idle": {}}


def test_files_that_were_taken_over_and_our_own_are_no_news(tmp_path: Path) -> None:
    """Whatever their times: a copy of a store has new ones."""
    as_rocketmq_writes(tmp_path, "consumerOffset.json", {"offsetTable": {"Orders@readers": {"0": 12}}})
    taken = newer_changes(tmp_path, {}, KNOWN)
    assert taken is not None
    assert newer_changes(tmp_path, taken.sums, KNOWN) is None

    write(tmp_path)
    assert newer_changes(tmp_path, {}, KNOWN) is None


def test_a_damaged_file_of_rocketmqs_changes_nothing(tmp_path: Path) -> None:
    """What is known stays known."""
    as_rocketmq_writes(tmp_path, "consumerOffset.json", {"offsetTable": 3})

    assert newer_changes(tmp_path, {}, KNOWN) is None


def test_a_second_take_over_is_told_and_survives_a_kill(
    add_member: Callable[[str], Member], caplog: pytest.LogCaptureFixture
) -> None:
    """There and back: our files at the stop, RocketMQ's afterwards, and a kill right after they were read."""
    member = add_member("one")
    member.promote()
    member.do(lambda done: member.state.put_topic(TopicConfig("T"), done))
    member.do(lambda done: member.state.commit_delay_offsets({1: 5}, done))
    member.state.shutdown()
    assert read(member.directory, "topics.json")["topicConfigTable"].keys() == {"T"}
    as_rocketmq_writes(member.directory, "delayOffset.json", {"offsetTable": {"1": 8}})

    with caplog.at_level(logging.WARNING):
        member.restart(clean=False)
    assert "RocketMQ has used this store since" in caplog.text
    member.state.step()
    member.restart(clean=False)

    assert member.state.delay_offset(1) == 8
    assert read(member.directory, "delayOffset.json")["offsetTable"] == {"1": 8}


def test_a_first_take_over_survives_a_kill(tmp_path: Path, add_member: Callable[[str], Member]) -> None:
    """The files are replaced only once what they said is kept elsewhere."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:17}}}')
    member = add_member("one")
    member.state.step()
    member.restart(clean=False)

    assert member.state.offset("g", "T", 0) == 17


def test_a_running_broker_writes_the_files_every_few_seconds(add_member: Callable[[str], Member]) -> None:
    """A broker that is killed leaves them a few seconds old, as RocketMQ's does."""
    member = add_member("one")
    member.promote()
    member.do(lambda done: member.state.put_topic(TopicConfig("T"), done))
    member.clock.now_ms += member.settings.snapshot_interval_ms
    member.state.step()

    assert read(member.directory, "topics.json")["topicConfigTable"].keys() == {"T"}


def test_topics_that_rocketmq_made_are_found_in_a_copy_of_the_store(
    add_member: Callable[[str], Member], tmp_path: Path
) -> None:
    """`cp -r` gives every file the time of the copy, in any order: the snapshot may be the newest."""
    member = add_member("one")
    member.promote()
    member.do(lambda done: member.state.put_topic(TopicConfig("T"), done))
    member.state.shutdown()
    made = {f"M{number}": {"perm": 6, "readQueueNums": 4, "writeQueueNums": 4} for number in range(40)}
    as_rocketmq_writes(member.directory, "topics.json", {"topicConfigTable": made})
    for age, path in enumerate(sorted(member.directory.iterdir(), key=lambda one: one.name != SNAPSHOT_FILE)):
        os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))

    member.restart(clean=False)

    assert {topic.name for topic in member.state.topics()} == made.keys()


@pytest.fixture
def importer(tmp_path: Path, add_member: Callable[[str], Member]) -> Member:
    """A master that has taken over RocketMQ's offset 17 in T, and got on to 20 since."""
    (tmp_path / "one").mkdir()
    as_rocketmq_writes(tmp_path / "one", "consumerOffset.json", {"offsetTable": {"T@g": {"0": 17}}})
    member = add_member("one")
    member.promote()
    member.do(lambda done: member.state.put_topic(TopicConfig("T"), done))
    member.store.log.queue_offsets["T", 0] = 30
    member.do(lambda done: member.state.commit_offsets("g", [("T", 0, 20)], done=done))
    member.clock.now_ms += member.settings.snapshot_interval_ms
    return member


@pytest.fixture
def _no_room_for_rocketmqs_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RocketmqFiles, "write", fails)


@pytest.mark.usefixtures("_no_room_for_rocketmqs_files")
def test_what_was_taken_over_does_not_come_again_before_ours_has_replaced_it(importer: Member) -> None:
    """RocketMQ's file is still there, as old as it was: what happened here since is newer."""
    importer.state.step()
    assert "writtenBy" not in read(importer.directory, "consumerOffset.json")

    importer.restart(clean=False)

    assert importer.state.offset("g", "T", 0) == 20


def test_what_rocketmq_writes_after_us_is_news_also_if_it_is_what_it_wrote_before(importer: Member) -> None:
    """An administrator has put the group back to where it was."""
    importer.state.flush()
    assert read(importer.directory, "consumerOffset.json")["writtenBy"] == "dledger"
    importer.restart(clean=False)
    assert importer.state.offset("g", "T", 0) == 20

    as_rocketmq_writes(importer.directory, "consumerOffset.json", {"offsetTable": {"T@g": {"0": 17}}})
    importer.restart(clean=False)

    assert importer.state.offset("g", "T", 0) == 17


def test_without_a_snapshot_rocketmqs_files_are_not_forgotten_silently(
    add_member: Callable[[str], Member], caplog: pytest.LogCaptureFixture
) -> None:
    """The log's state counts, and the files that do not are named."""
    member = add_member("one")
    member.promote()
    member.do(lambda done: member.state.put_topic(TopicConfig("T"), done))
    member.state.shutdown()
    (member.directory / SNAPSHOT_FILE).unlink()
    as_rocketmq_writes(member.directory, "topics.json", {"topicConfigTable": {}})

    member.restart(clean=False)

    assert "not imported, although RocketMQ wrote it last: topics.json" in caplog.text
