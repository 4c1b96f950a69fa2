"""``export_member``: a group member's log as a plain broker's directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import ConfigError, CorruptLogError, DirectoryLockedError, DiskError, DiskFullError
from dledger.store.durable_state import create_checkpoint, read_checkpoint
from dledger.store.fs import DiskUsage, FileSystem
from dledger.store.verify import verify_node
from dledger.types import LogIndex
from rocketstore.config import MessageStoreConfig
from rocketstore.consume_queue.files import UNIT_BYTES, pack_unit
from rocketstore.message.message import Message
from rocketstore.message.record import BLANK, BLANK_MAGIC, decode_record
from rocketstore.message.timed import make_timed, recall_message
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.store.directory import ABORT_FILE
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.hours import HOUR_MS, open_entries
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, TRANSACTION_CHECKS_TOPIC, PutResult, QueueUnit, RecordHead
from rocketstore.upgrade import export
from rocketstore.upgrade.directories import StateRecords
from rocketstore.upgrade.export import Choices, export_member
from rocketstore.verification.verify import verify_broker
from tests.support.damage import turn
from tests.support.waiting import wait_until
from tests.unit.dledger_spark.rebuild.stores import put_all
from tests.unit.rocketstore.bench import WAIT_S, bodies, fill, running, small_config, with_key
from tests.unit.rocketstore.broker import test_mixed
from tests.unit.rocketstore.export.expiring import OLD, make_expired
from tests.unit.rocketstore.export.members import export_of, in_place, messages_in, plain, with_state
from tests.unit.rocketstore.store.test_message_store_replicated import master

COMMITTED = 0x8
DUE_MS = 2_000_000_000_000


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    return small_config(tmp_path / "member", enable_dledger_commit_log=True, max_index_num=120)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "plain"


def done(change: Callable[[StateDone], None]) -> None:
    """Make a change of the state and wait for it."""
    results: list[PutResult] = []
    change(results.append)
    wait_until(lambda: bool(results), "the change is answered")
    assert results[0].ok, results


def test_a_plain_store_serves_every_message_where_it_was_in_its_queue(config: MessageStoreConfig, target: Path) -> None:
    """Of every kind and over many files; only physical offsets change, and new messages come after the old ones."""
    with master(config) as store:
        put_all(store, 400)
        before = messages_in(store)
        ends = {key: store.max_offset(*key) for key in store.queues() if key[0] not in HIDDEN_TOPICS}

    found = export_of(config, target)

    assert found.messages >= 400 > len(before) > 300  # prepared and rolled-back ones are in no queue
    assert found.files > 3
    with running(plain(config, target)) as store:
        after = messages_in(store)
        assert {place: in_place(one) for place, one in after.items()} == {
            place: in_place(one) for place, one in before.items()
        }
        assert {key: store.max_offset(*key) for key in store.queues()} == ends
        put_all(store, 20, first=400)
        assert len(messages_in(store)) > len(after)


def test_messages_that_wait_for_their_time_wait_on(config: MessageStoreConfig, target: Path) -> None:
    """Those recalled do not; queue offsets stay, so recall handles stay good, and every entry leads to its record."""
    with master(config) as store:
        for number in range(20):
            message = Message("T", b"%d" % number, 0, {"UNIQ_KEY": f"{number:02X}"})
            make_timed(message, DUE_MS + number % 3 * HOUR_MS + number)
            assert store.put(message).ok
        recalled = recall_message(4, DUE_MS + HOUR_MS + 4, "04", Message("T", b"").store_host, 1)
        assert store.put(recalled).ok
        assert store.wait_dispatched(WAIT_S)
        before = waiting_in(store)

    export_of(config, target)

    with running(plain(config, target)) as store:
        assert store.wait_dispatched(WAIT_S)
        assert waiting_in(store) == before
        assert sorted(int(body) for _, _, _, body in before) == [number for number in range(20) if number != 4]
    assert not verify_broker(plain(config, target), None).problems


def waiting_in(store: MessageStore) -> list[tuple[int, int, int, bytes]]:
    """Due time, place and origin of each message that waits, and its body."""
    found = []
    for hour in store.timers.hours():
        for row in open_entries(store.timers.entries(hour)):
            record = store.read_record(int(row["position"]))
            assert record is not None
            place = int(row["due_ms"]), int(row["queue_offset"]), int(row["origin"])
            found.append((*place, decode_record(record).body))
    return found


def test_files_end_with_blanks_as_rocketmqs_do(config: MessageStoreConfig, target: Path) -> None:
    """store.md 1.1: what remains of the file and the magic; no record leaves less room than that."""
    with master(config) as store:
        fill(store, 200, size=700)
    export_of(config, target)

    paths = sorted((target / "commitlog").iterdir())
    assert len(paths) > 5
    for number, path in enumerate(paths):
        assert path.name == f"{number * config.mapped_file_size_commit_log:020d}"
        content = path.read_bytes()
        assert len(content) == config.mapped_file_size_commit_log
        at = 0
        while True:
            size, magic = BLANK.unpack_from(content, at)
            if magic == BLANK_MAGIC or size == 0:
                break
            at += size
            assert at + BLANK.size <= len(content)
        assert size == (len(content) - at if path is not paths[-1] else 0)


def test_a_committed_message_names_its_half_message_where_that_is_now(config: MessageStoreConfig, target: Path) -> None:
    """Brokers find out with it which transactions are done; one whose half message has expired names none."""
    with master(config) as store:
        fill(store, 30)
        half = store.put(Message(HALF_TOPIC, b"half", 0, {"REAL_TOPIC": "T"})).stored
        assert half is not None
        fill(store, 30, first=30)
        for prepared in (half.offset, 12345):
            assert store.put(Message("Done", b"", sys_flag=COMMITTED, prepared_offset=prepared)).ok

    found = export_of(config, target)

    assert found.commits == 1
    with running(plain(config, target)) as store:
        messages = messages_in(store)
        moved = messages[HALF_TOPIC, 0, 0].offset
        assert moved != half.offset
        assert [messages["Done", 0, number].prepared_offset for number in (0, 1)] == [moved, -1]


def test_a_half_message_in_the_old_files_is_named_where_it_stays(tmp_path: Path, target: Path) -> None:
    """A transaction that began at the plain broker and was committed in the group is done in the export, too."""
    root = test_mixed.plain_store(tmp_path / "member", 20)
    with test_mixed.running(test_mixed.plain(root)) as (broker,):
        half = broker.store.put(Message(HALF_TOPIC, b"half", 0, {"REAL_TOPIC": "T"})).stored
        assert half is not None
    (member,) = test_mixed.members(root)
    with test_mixed.running(member) as (broker,):
        store = test_mixed.master_of([broker]).store
        done_message = Message("Done", b"", sys_flag=COMMITTED, prepared_offset=half.offset)
        wait_until(lambda: store.put(done_message).ok, "it is stored")

    export_of(member.store, target)

    with running(plain(member.store, target)) as exported:
        messages = messages_in(exported)
        assert messages[HALF_TOPIC, 0, 0].offset == half.offset
        assert messages["Done", 0, 0].prepared_offset == half.offset


def test_topics_groups_offsets_and_delays_come_along(config: MessageStoreConfig, target: Path) -> None:
    """In the files that RocketMQ reads, and in the snapshot that our broker does; without the log's records of them."""
    with with_state(config) as (store, state):
        done(lambda then: state.put_topic(TopicConfig("T", 4, 4, 6, order=True), then))
        done(lambda then: state.put_group(GroupConfig("strict", retry_times_max=3), then))
        fill(store, 20)
        done(lambda then: state.commit_offsets("readers", [("T", 0, 7), ("T", 1, 10)], done=then))
        done(lambda then: state.commit_delay_offsets({3: 0}, then))
        done(lambda then: state.put_topic(TopicConfig("Later", 1, 1), then))

    found = export_of(config, target)

    assert found.left_out["RMQ_SYS_BROKER_STATE"] >= 5
    assert (found.topics, found.groups, found.offsets) == (2, 2, 2)
    names = ("topics", "consumerOffset", "subscriptionGroup", "delayOffset")
    files = {name: json.loads((target / "config" / f"{name}.json").read_text()) for name in names}
    assert set(files["topics"]["topicConfigTable"]) == {"T", "Later"}
    assert files["topics"]["topicConfigTable"]["T"]["order"] is True
    assert files["consumerOffset"]["offsetTable"] == {"T@readers": {"0": 7, "1": 10}}
    assert files["subscriptionGroup"]["subscriptionGroupTable"]["strict"]["retryMaxTimes"] == 3
    assert files["delayOffset"]["offsetTable"] == {"3": 0}
    with with_state(plain(config, target)) as (store, state):
        assert [one.name for one in state.topics()] == ["Later", "T"]
        assert state.offset("readers", "T", 1) == 10
        assert state.group("strict").retry_times_max == 3
        assert len(bodies(store)) == 10


def test_state_that_is_only_in_the_log_is_exported(config: MessageStoreConfig, target: Path) -> None:
    """After a kill, the snapshot may be missing or old."""
    with with_state(config) as (_, state):
        done(lambda then: state.put_topic(TopicConfig("T", 2, 2), then))
    shutil.rmtree(config.config_dir)

    assert export_of(config, target).topics == 1


def test_state_of_which_changes_are_missing_is_refused(config: MessageStoreConfig, target: Path) -> None:
    """A state that lacks a topic or an offset must not be taken for the group's."""
    with with_state(config) as (_, state):
        done(lambda then: state.put_topic(TopicConfig("T", 2, 2), then))
    snapshot = config.config_dir / "brokerState.json"
    snapshot.unlink()

    class Expired(StateRecords):
        """As if the messages had expired."""

        def add(self, head: RecordHead) -> None:
            self.next_offset = head.queue_offset + 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export, "StateRecords", Expired)
        with pytest.raises(CorruptLogError, match="Export another member"):
            export_of(config, target)
    assert not target.exists()


def test_queues_go_on_although_their_messages_have_expired(config: MessageStoreConfig, target: Path) -> None:
    """RocketMQ counts on from a queue's last unit; else offsets are given out twice, and consumers skip messages."""
    make_expired(config)

    found = export_of(config, target)

    assert found.begin > 0
    assert found.expired_queues == 1
    opened = plain(config, target)
    with running(opened) as store:
        assert (store.min_offset("Old", 0), store.max_offset("Old", 0)) == (OLD, OLD)
        assert store.put(Message("Old", b"%d" % OLD)).ok
    shutil.rmtree(target / "index")
    (target / "abort").touch()
    with running(opened) as store:
        assert bodies(store, topic="Old") == [OLD]
        assert store.max_offset("Old", 0) == OLD + 1
    assert not verify_broker(opened, None).problems


def test_queues_go_on_although_no_message_at_all_is_left(config: MessageStoreConfig, target: Path) -> None:
    """A group that was idle for long: its last segment holds only what a plain broker does not get."""
    make_expired(config, later=TRANSACTION_CHECKS_TOPIC)

    found = export_of(config, target)

    assert (found.messages, found.expired_queues) == (0, 1)
    opened = plain(config, target)
    for end in (OLD, OLD + 1):
        with running(opened) as store:
            assert store.max_offset("Old", 0) == end
            assert store.put(Message("Old", b"%d" % end)).ok
            assert store.wait_dispatched(WAIT_S)
            assert bodies(store, topic="Old") == list(range(OLD, end + 1))
    assert not verify_broker(opened, None).problems


def test_queue_files_of_a_member_that_was_killed_are_not_believed(config: MessageStoreConfig, target: Path) -> None:
    """They may be ahead of its log; what the log says counts."""
    make_expired(config)
    (config.store_path_root_dir / ABORT_FILE).touch()
    directory = config.consume_queue_dir / "T" / "0"
    last = max(path for path in directory.iterdir() if any(path.read_bytes()))
    units = last.read_bytes()
    used = next(at for at in range(0, len(units), UNIT_BYTES) if not any(units[at : at + UNIT_BYTES]))
    last.write_bytes(units[:used] + pack_unit(QueueUnit(1 << 30, 100, 0)) + units[used + UNIT_BYTES :])

    export_of(config, target)

    with running(plain(config, target)) as store:
        assert store.max_offset("T", 0) == 30


def forget_commits(config: MessageStoreConfig, entries: int) -> None:
    """As a killed member's checkpoint is: behind what was committed."""
    (directory,) = config.store_path_root_dir.glob("dledger-*")
    path = directory / "checkpoint"
    known = read_checkpoint(path)
    path.unlink()
    create_checkpoint(FileSystem(), path, replace(known, committed=LogIndex(known.committed - entries)))


def test_messages_not_known_to_be_committed_are_named_and_left_to_a_person(
    config: MessageStoreConfig, target: Path
) -> None:
    """They may be acknowledged, and nobody may lose those; or nobody was told, and they would come from nowhere."""
    with master(config) as store:
        fill(store, 40)
    forget_commits(config, 7)

    with pytest.raises(ConfigError, match=r"7 messages.*--whole-log.*--committed-only"):
        export_of(config, target)
    assert not target.exists()

    found = export_of(config, target, Choices(committed_only=True))
    assert (found.tail, found.tail_messages, found.messages) == (7, 7, 33)
    with running(plain(config, target)) as store:
        assert len(messages_in(store)) == 33
    shutil.rmtree(target)

    found = export_of(config, target, Choices(whole_log=True))
    assert (found.tail, found.messages) == (0, 40)


def test_no_ops_that_are_not_known_to_be_committed_need_no_decision(config: MessageStoreConfig, target: Path) -> None:
    """The last members of a group to be stopped elect each other, and cannot commit any more."""
    with master(config) as store:
        fill(store, 4)
    with master(config):
        pass
    forget_commits(config, 1)

    found = export_of(config, target)

    assert (found.tail, found.tail_messages, found.messages) == (1, 0, 4)


def test_damage_in_the_member_is_refused(config: MessageStoreConfig, target: Path) -> None:
    """A plain log has fewer checksums: what is wrong would be served from then on."""
    with master(config) as store:
        fill(store, 40)
    (directory,) = config.store_path_root_dir.glob("dledger-*")
    turn(min((directory / "data").iterdir()), 500)

    with pytest.raises(ConfigError, match="export another member"):
        export_of(config, target)


def test_a_running_member_is_refused(config: MessageStoreConfig, target: Path) -> None:
    """Its log goes on, and so does its state."""
    with master(config) as store:
        fill(store, 4)
        with pytest.raises(DirectoryLockedError):
            export_of(config, target)


def test_what_stands_in_the_way_is_said_before_anything_is_written(config: MessageStoreConfig, target: Path) -> None:
    """A target with something in it, one inside the source, the rest of an interrupted export, a full disk."""
    with master(config) as store:
        fill(store, 4)
    (directory,) = config.store_path_root_dir.glob("dledger-*")

    class Full(FileSystem):
        def usage(self, path: Path) -> DiskUsage:
            return DiskUsage(super().usage(path).total_bytes, 1000, 1)

    with pytest.raises(DiskFullError, match="1,000 bytes left"):
        export_member(config, verify_node(directory), target, fs=Full())
    with pytest.raises(ConfigError, match="inside the directory"):
        export_of(config, config.store_path_root_dir / "plain")
    target.mkdir()
    (target / "something").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export_of(config, target)
    (target / "something").unlink()
    partial = target.with_name("plain.partial")
    partial.mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        export_of(config, target)
    partial.rmdir()
    assert export_of(config, target).messages == 4


class Interrupted(FileSystem):
    """Fails at one of its writes, syncs and renames."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "interrupted")

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        self._count()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count()

    def sync_dir(self, path: Path) -> None:
        self._count()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)


class Syncs(FileSystem):
    """Knows which files were flushed."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._paths: dict[int, Path] = {}

    def open(self, path: Path, *, writable: bool = True) -> int:
        fd = super().open(path, writable=writable)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if fd in self._paths:
            self.names.add(self._paths[fd].name)


def test_what_is_copied_is_flushed(config: MessageStoreConfig, target: Path) -> None:
    """Before the directory gets its name: old log files, and state files, as this one."""
    with master(config) as store:
        fill(store, 4)
    config.config_dir.mkdir(exist_ok=True)
    (config.config_dir / "consumerFilter.json").write_text("{}")
    (directory,) = config.store_path_root_dir.glob("dledger-*")

    fs = Syncs()
    export_member(config, verify_node(directory), target, fs=fs)

    assert (target / "config" / "consumerFilter.json").read_text() == "{}"
    assert "consumerFilter.json" in fs.names


def test_an_export_that_fails_anywhere_leaves_nothing(config: MessageStoreConfig, target: Path) -> None:
    """Neither a target that looks whole nor the rest of one; the source is as before, and the next attempt succeeds."""
    with master(config) as store:
        fill(store, 60, size=500)
    (directory,) = config.store_path_root_dir.glob("dledger-*")
    node = verify_node(directory)

    failed, at = 0, 1
    while True:
        fs = Interrupted(at)
        try:
            export_member(config, node, target, fs=fs)
            break
        except (OSError, DiskError):
            failed += 1
            renamed = target.exists()  # the last sync comes after the rename
            assert list(target.parent.glob("*.partial")) == []
            if renamed:
                shutil.rmtree(target)
        at += 1

    assert failed > 20
    with running(plain(config, target)) as store:
        assert bodies(store) == list(range(0, 60, 2))
        assert with_key(store, 33) == [33]


@pytest.mark.parametrize("what", ["commitlog", "consumequeue/T/0", "index"])
def test_an_export_that_the_disk_altered_is_refused(
    config: MessageStoreConfig, target: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is read back before the directory gets its name."""
    with master(config) as store:
        fill(store, 40)
    write_state = export._Export.write_state

    def altered(export: export._Export) -> None:
        write_state(export)
        path = min((target.with_name("plain.partial") / what).iterdir())
        turn(path, 17 if what != "index" else path.stat().st_size - 20 * (400 - 20) + 11)

    monkeypatch.setattr(export._Export, "write_state", altered)
    with pytest.raises(CorruptLogError):
        export_of(replace(config, max_index_num=400), target)
    assert not target.exists()


@pytest.mark.parametrize("link", [False, True])
def test_the_old_files_of_a_mixed_log_are_taken_over_as_they_are(tmp_path: Path, target: Path, *, link: bool) -> None:
    """Their offsets stay, and so do the messages' ids; the group's records follow in new files."""
    root = test_mixed.plain_store(tmp_path / "member", 100)
    (member,) = test_mixed.members(root)
    with test_mixed.running(member) as (broker,):
        test_mixed.master_of([broker])
        test_mixed.fill(broker, 100, 60)
        divided = test_mixed.divided_of(broker)
        before = messages_in(broker.store)

    found = export_of(member.store, target, Choices(link=link))

    assert found.copied > 100 > found.messages == 60
    for old in (root / "commitlog").iterdir():
        if int(old.name) < divided:
            copy = target / "commitlog" / old.name
            assert copy.read_bytes() == old.read_bytes()
            assert copy.samefile(old) is link
    with test_mixed.running(test_mixed.plain(target)) as (broker,):
        test_mixed.has_all(broker, 160)
        after = messages_in(broker.store)
        assert {place: in_place(one) for place, one in after.items()} == {
            place: in_place(one) for place, one in before.items()
        }
        old_offsets = {place: one.offset for place, one in before.items() if one.offset < divided}
        assert len(old_offsets) >= 100
        assert {place: after[place].offset for place in old_offsets} == old_offsets
        assert broker.state.topic("T") is not None
        test_mixed.fill(broker, 160, 10)
        test_mixed.has_all(broker, 170)


def test_old_files_that_are_missing_are_named(tmp_path: Path, target: Path) -> None:
    """A group's log continues them: without, messages would be missing in the middle of queues."""
    root = test_mixed.plain_store(tmp_path / "member", 100)
    (member,) = test_mixed.members(root)
    with test_mixed.running(member) as (broker,):
        test_mixed.master_of([broker])
        test_mixed.fill(broker, 100, 4)
    sorted((root / "commitlog").iterdir())[1].unlink()

    with pytest.raises(ConfigError, match="restore them"):
        export_of(member.store, target)
