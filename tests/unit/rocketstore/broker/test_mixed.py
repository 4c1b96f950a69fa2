"""Whole brokers whose group continues the log of a plain one: alone, and three of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dledger.errors import ConfigError
from dledger.monitoring import ConditionKind
from dledger_cli.cli import main
from dledger_cli.local.group import free_ports
from rocketstore.broker_config import BrokerConfig
from rocketstore.client import PreparedMessage, Producer, TransactionState
from rocketstore.commit_log.mixed import MixedCommitLog
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole, GetMessageStatus, PutResult
from tests.support.damage import turn
from tests.support.waiting import wait_until

FILE_BYTES = 16 * 1024
_SMALL = {
    "listenPort": "0",
    "mappedFileSizeCommitLog": str(FILE_BYTES),
    "mappedFileSizeConsumeQueue": "2000",
    "maxMessageSize": "4000",
    "maxHashSlotNum": "100",
    "maxIndexNum": "400",
    "deleteWhen": "",
    "deleteCommitLogFilesInterval": "0",
    "vipPort": "0",
}
_MEMBER = {
    "enableDLegerCommitLog": "true",
    "dLegerGroup": "G",
    "index_segment_bytes": "32000",
    "warm_bytes": "0",
    "heartbeat_interval_ms": "100",
    "election_timeout_ms_min": "500",
    "election_timeout_ms_max": "1000",
}


def plain(root: Path, **more: str) -> BrokerConfig:
    """A plain broker on any free port."""
    return load_broker_settings(None, {}, {"storePathRootDir": str(root), **_SMALL, **more})[0]


def members(*roots: Path, **more: str) -> list[BrokerConfig]:
    """One member per directory."""
    ports = free_ports(2 * len(roots))
    peers = ";".join(f"n{number}-127.0.0.1:{ports[2 * number]}" for number in range(len(roots)))
    return [
        load_broker_settings(
            None,
            {},
            {
                "storePathRootDir": str(root),
                "dLegerSelfId": f"n{number}",
                "dLegerPeers": peers,
                **_SMALL,
                **_MEMBER,
                "listenPort": str(ports[2 * number + 1]),
                **more,
            },
        )[0]
        for number, root in enumerate(roots)
    ]


@contextmanager
def running(*configs: BrokerConfig) -> Iterator[list[BrokerServer]]:
    """Brokers, until the end of the block."""
    with ExitStack() as stack:
        brokers = []
        for config in configs:
            broker = BrokerServer(config)
            stack.callback(broker.stop, graceful=False)
            brokers.append(broker.start())
        yield brokers


def master_of(brokers: Sequence[BrokerServer]) -> BrokerServer:
    """The one that takes messages, waited for."""

    found: list[BrokerServer] = []

    def there_is_one() -> bool:
        found.extend(one for one in brokers if one.store.role is not BrokerRole.SLAVE and one.is_ready)
        return bool(found)

    wait_until(there_is_one, "there is a master")
    return found[0]


def fill(broker: BrokerServer, first: int, count: int, *, queues: int = 2) -> None:
    """Messages ``first``, ``first + 1``, …; each is stored when this returns, and in its queue."""
    for number in range(first, first + count):
        message = Message("T", b"%d" % number + bytes(200), number % queues, {"KEYS": f"k{number}"})
        wait_until(lambda message=message: broker.store.put(message).ok, "it is stored")  # type: ignore[misc]
    wait_until(lambda: broker.store.dispatch_behind_bytes == 0, "everything is dispatched")


def numbers(broker: BrokerServer, queue_id: int = 0, topic: str = "T") -> list[int]:
    """What a queue holds from its begin on, without gaps in its offsets."""
    store = broker.store
    at, found = max(0, store.min_offset(topic, queue_id)), list[int]()
    while True:
        result = store.get(topic, queue_id, at, max_count=32)
        if result.status is not GetMessageStatus.FOUND:
            return found
        for number, record in enumerate(result.records, at):
            message = decode_record(record)
            assert (message.queue_id, message.queue_offset) == (queue_id, number)
            found.append(int(message.body.rstrip(b"\0")))
        at = result.next_offset


def has_all(broker: BrokerServer, count: int, *, queues: int = 2) -> None:
    """Messages 0 to ``count``, in order."""
    for queue_id in range(queues):
        wanted = list(range(queue_id, count, queues))
        wait_until(
            lambda queue_id=queue_id, wanted=wanted: numbers(broker, queue_id) == wanted,  # type: ignore[misc]
            "it has every message",
        )


def divided_of(broker: BrokerServer) -> int:
    """Where its old log ends."""
    assert isinstance(broker.store.log, MixedCommitLog)
    return broker.store.log.divided


def plain_store(root: Path, count: int = 100) -> Path:
    """A directory that a plain broker with these messages has left."""
    with running(plain(root)) as (broker,):
        fill(broker, 0, count)
        wait_until(lambda: broker.state.topic("T") is not None or _make_topic(broker), "the topic is there")
        done: list[PutResult] = []
        broker.state.commit_offsets("group", [("T", 0, 7)], done=done.append)
        wait_until(lambda: bool(done), "the offset is stored")
        broker.stop()
    return root


def _make_topic(broker: BrokerServer) -> bool:
    done: list[PutResult] = []
    broker.state.put_topic(TopicConfig("T", 2, 2), done.append)
    wait_until(lambda: bool(done), "the topic is stored")
    return False


def copies(root: Path, count: int) -> list[Path]:
    """That many copies of a store."""
    return [Path(shutil.copytree(root, root.with_name(f"{root.name}-{number}"))) for number in range(count)]


def test_put_and_get(tmp_path: Path) -> None:
    """RocketMQ's testPutAndGet: the group goes on at the old log's next file, and queue offsets without a gap, also
    after two more starts.
    """
    root = plain_store(tmp_path / "store")
    last = max(int(path.name) for path in (root / "commitlog").iterdir())
    (config,) = members(root)
    opened = BrokerServer(config)
    assert opened.store.log.max_offset == opened.store.log.end_offset == last + FILE_BYTES
    opened.stop()
    for total in (200, 300, 400):
        with running(config) as (broker,):
            assert divided_of(broker) == last + FILE_BYTES
            master_of([broker])
            has_all(broker, total - 100)
            fill(broker, total - 100, 100)
            has_all(broker, total)
            assert broker.store.log.min_offset == 0
            broker.stop()


def test_topics_and_progress_come_along(tmp_path: Path) -> None:
    """They are in the old log's state records, or in the snapshot."""
    root = plain_store(tmp_path / "store")
    (config,) = members(root)
    with running(config) as (broker,):
        master_of([broker])
        topic = broker.state.topic("T")
        assert topic is not None
        assert broker.state.offset("group", "T", 0) == 7


def test_three_members_continue_three_copies(tmp_path: Path) -> None:
    """Old and new messages are served by all of them, also once the leader is gone; what was stored stays."""
    configs = members(*copies(plain_store(tmp_path / "store"), 3))
    with running(*configs) as brokers:
        master = master_of(brokers)
        fill(master, 100, 60)
        for broker in brokers:
            has_all(broker, 160)
            assert broker.state.offset("group", "T", 0) == 7
        master.stop(graceful=False)
        others = [one for one in brokers if one is not master]
        fill(master_of(others), 160, 60)
        for broker in others:
            has_all(broker, 220)


def why_alone(broker: BrokerServer) -> list[str]:
    """What a broker says of peers that it does not talk to."""
    return [one.message for one in broker.conditions.now() if one.kind == ConditionKind.OTHER_OLD_LOG]


def last_index(broker: BrokerServer) -> int:
    """The last entry of a member's replicated log."""
    assert broker.node is not None
    return broker.node.status().end_index


def test_members_whose_old_logs_differ_do_not_become_a_group(tmp_path: Path) -> None:
    """They say why, and store nothing; once the logs are equal, they are a group. Only derived files need not be."""
    roots = copies(plain_store(tmp_path / "store"), 3)
    other = Path(shutil.copytree(roots[2], tmp_path / "other"))
    with running(plain(other)) as (broker,):
        fill(broker, 100, 1)
        broker.stop()
    configs = members(roots[0], roots[1], other)
    with running(*configs) as brokers:
        for broker in brokers:
            wait_until(lambda broker=broker: bool(why_alone(broker)), "it says why it is alone")  # type: ignore[misc]
            assert "dledger upgrade check" in why_alone(broker)[0]
        wait_until(lambda: len(why_alone(brokers[2])) == 2, "it is apart from both others")
        assert [last_index(one) for one in brokers] == [-1, -1, -1]
        assert not any(one.is_ready for one in brokers)

    shutil.rmtree(other)
    shutil.copytree(roots[2], other)  # as it was
    with running(*configs) as brokers:
        fill(master_of(brokers), 100, 10)
        for broker in brokers:
            has_all(broker, 110)
            wait_until(lambda broker=broker: not why_alone(broker), "nothing is wrong any more")  # type: ignore[misc]


def test_a_new_disk_needs_the_old_files(tmp_path: Path) -> None:
    """The group replicates only what came after them: an empty member is kept out until they are copied."""
    configs = members(*copies(plain_store(tmp_path / "store"), 3))
    with running(*configs[:2]) as brokers, running(configs[2]) as (third,):
        fill(master_of([*brokers, third]), 100, 10)
        third.stop()
        root = configs[2].store.store_path_root_dir
        shutil.rmtree(root)
        with running(configs[2]) as (empty,):
            wait_until(lambda: bool(why_alone(empty)), "it says what it lacks")
            assert "has no old log" in why_alone(empty)[0]
            assert last_index(empty) == -1
        shutil.copytree(configs[0].store.store_path_root_dir / "commitlog", root / "commitlog")
        with running(configs[2]) as (whole,):
            has_all(whole, 110)


def test_what_waits_in_the_old_log_still_comes(tmp_path: Path) -> None:
    """A delayed message is delivered, and a transaction that is open is asked about and ended, both once."""
    root, asked = tmp_path / "store", list[str]()

    def check(message: PreparedMessage) -> TransactionState:
        asked.append(message.transaction_id)
        return TransactionState.COMMIT

    with running(plain(root, messageDelayLevel="1h")) as (broker,):
        _make_topic(broker)
        assert broker.store.put(Message("T", b"7", 0, {"DELAY": "1"})).ok
        with (
            Producer(broker.address, group="g", check=check) as producer,
            producer.transaction(Message("T", b"8"), queue=1) as transaction,
        ):
            transaction.leave_open()
        wait_until(lambda: broker.store.dispatch_behind_bytes == 0, "everything is dispatched")
        broker.stop()
    assert not asked
    soon = {"messageDelayLevel": "1s", "transactionTimeOut": "1", "transactionCheckInterval": "100"}
    (config,) = members(root, **soon)
    with (
        running(config) as (broker,),
        Producer(master_of([broker]).address, group="g", check=check),
    ):
        wait_until(lambda: numbers(broker) == [7], "the delayed message has come")
        wait_until(lambda: numbers(broker, 1) == [8], "the transaction is committed")
        fill(broker, 9, 1, queues=1)
        assert numbers(broker) == [7, 9]
        broker.stop()
    assert len(set(asked)) == 1
    with running(config) as (broker,):
        master_of([broker])
        fill(broker, 10, 1, queues=1)
        assert (numbers(broker), numbers(broker, 1)) == ([7, 9, 10], [8])


def test_fall_behind_cq(tmp_path: Path) -> None:
    """RocketMQ's testFallBehindCQ: lost consume queues are built again from both logs, and numbering goes on."""
    root = plain_store(tmp_path / "store")
    (config,) = members(root)
    for total in (200, 300):
        shutil.rmtree(root / "consumequeue")
        (root / "abort").touch()
        with running(config) as (broker,):
            master_of([broker])
            has_all(broker, total - 100)
            fill(broker, total - 100, 100)
            has_all(broker, total)
            found = broker.store.query("T", "k3", 10, 0, 1 << 60)
            assert [decode_record(one).queue_offset for one in found] == [1]
            broker.stop()


def test_rocketmqs_state_is_taken_over(tmp_path: Path) -> None:
    """Of a broker that keeps it in its own files; after that, the group's log has it, and the files follow."""
    root = tmp_path / "store"
    with running(plain(root)) as (broker,):
        fill(broker, 0, 20)
        broker.stop()
    for path in (root / "config").iterdir():
        path.unlink()
    (root / "config" / "topics.json").write_text(
        '{"topicConfigTable":{"T":{"topicName":"T","readQueueNums":2,"writeQueueNums":2,"perm":6}}}'
    )
    (root / "config" / "consumerOffset.json").write_text('{"offsetTable":{"T@readers":{0:7,1:5}}}')
    configs = members(*copies(root, 3))
    for _ in range(2):
        with running(*configs) as brokers:
            master_of(brokers)
            for broker in brokers:
                wait_until(lambda one=broker: one.state.offset("readers", "T", 1) == 5, "it is known")  # type: ignore[misc]
                assert broker.state.offset("readers", "T", 0) == 7
                assert broker.state.topic("T") is not None


def test_old_files_expire_and_a_new_disk_needs_none_then(tmp_path: Path) -> None:
    """The log then begins where the group's does, on every member by itself; an empty one gets all of it."""
    configs = members(*copies(plain_store(tmp_path / "store"), 3), fileReservedTime="1")
    with running(*configs[:2]) as brokers, running(configs[2]) as (third,):
        fill(master_of([*brokers, third]), 100, 60)
        divided = divided_of(third)
        third.stop()
        for broker in brokers:
            for path in broker.config.store.commit_log_dirs[0].iterdir():
                os.utime(path, (0, 0))
            wait_until(lambda one=broker: _cleaned(one, divided), "the old files are gone")  # type: ignore[misc]
            wait_until(lambda one=broker: numbers(one) == list(range(100, 160, 2)), "the rest is read")  # type: ignore[misc]
        shutil.rmtree(third.config.store.store_path_root_dir)
        with running(configs[2]) as (empty,):
            wait_until(lambda: numbers(empty) == list(range(100, 160, 2)), "it has what the others have")
            assert empty.store.log.min_offset == divided
            empty.stop()
        with running(configs[2]) as (again,):
            wait_until(lambda: numbers(again) == list(range(100, 160, 2)), "after another start, too")


def _cleaned(broker: BrokerServer, divided: int) -> bool:
    broker.store.request_clean()
    store = broker.store
    return store.log.min_offset == divided and all(store.min_offset("T", queue) == 50 for queue in range(2))


def test_a_members_log_is_repaired_behind_its_old_files(tmp_path: Path) -> None:
    """What is fetched again begins where the old log ends; the old files stay as they are."""
    configs = members(*copies(plain_store(tmp_path / "store"), 3))
    with running(*configs[:2]) as brokers, running(configs[2]) as (third,):
        fill(master_of([*brokers, third]), 100, 60)
        has_all(third, 160)
        divided = divided_of(third)
        third.stop()
        data = third.config.store.store_path_root_dir / "dledger-n2" / "data"
        turn(min(data.iterdir()), 20)
        repaired = BrokerServer(configs[2], repair=True)
        try:
            repaired.start()
            has_all(repaired, 160)
            assert divided_of(repaired) == divided
            assert repaired.node is not None
            assert repaired.node.log.begin.position == divided
        finally:
            repaired.stop()
    assert list(data.parent.glob("damaged-*"))


def test_verify_reads_both_logs(tmp_path: Path) -> None:
    """Queues and keys are compared with all of it; damage in an old file is named, and so is another content."""
    root = plain_store(tmp_path / "store")
    (config,) = members(root)
    with running(config) as (broker,):
        fill(master_of([broker]), 100, 60)
        broker.stop()
    conf = tmp_path / "broker.conf"
    conf.write_text("".join(f"{name}={value}\n" for name, value in _SMALL.items()))

    def verify(*more: str) -> dict[str, Any]:
        found = CliRunner().invoke(main, ["verify", str(root), "-c", str(conf), "--json", *more]).output
        return json.loads(found)  # type: ignore[no-any-return]

    sound = verify()
    assert sound["ok"], sound["problems"]
    assert sound["brokers"][0]["messages"] >= 160
    assert verify("--log-only")["brokers"][0]["messages"] >= 100
    first = root / "commitlog" / f"{0:020d}"
    turn(first, 300)
    for more in ((), ("--log-only",)):
        assert str(first) in {one["file"] for one in verify(*more)["problems"]}
    aside = first.rename(tmp_path / first.name)
    for more in ((), ("--log-only",)):
        said = [one["reason"] for one in verify(*more)["problems"] if one["file"] == str(first)]
        assert said == ["the file is missing"]
    aside.rename(first)
    other = plain_store(tmp_path / "other")  # the same messages, stored a moment later
    shutil.copyfile(other / "commitlog" / first.name, first)
    for more in ((), ("--log-only",)):
        said = [one["reason"] for one in verify(*more)["problems"] if one["file"] == str(first)]
        assert any("not those that the group took over" in one for one in said), said


def test_a_plain_broker_does_not_go_on_after_a_group(tmp_path: Path) -> None:
    """Its messages would take positions that the group has given to others."""
    root = plain_store(tmp_path / "store")
    (config,) = members(root)
    with running(config) as (broker,):
        master_of([broker])
        broker.stop()
    with pytest.raises(ConfigError, match="messages would become unreadable"):
        BrokerServer(plain(root))
