"""Properties of saying beforehand what a directory holds, and what of it will be there here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.errors import ConfigError
from dledger_cli.cli import main
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.state.files import TIMER_TOPIC
from rocketstore.store.message_store import MessageStore
from rocketstore.types import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC
from rocketstore.upgrade.survey import by_size, survey
from tests.interop.goldens import LEDGER, open_golden
from tests.unit.rocketstore.bench import WAIT_S, running, small_config
from tests.unit.rocketstore.store.test_message_store_replicated import master


def put(store: MessageStore, *messages: Message) -> None:
    """Store them."""
    for one in messages:
        assert store.put(one).ok
    assert store.wait_dispatched(WAIT_S)


def fill(store: MessageStore) -> None:
    """Messages of all kinds that a migration has to care about."""
    put(store, *(Message("orders", b"%d" % number, number % 3) for number in range(20)))
    put(store, *(Message("%RETRY%billing", b"r", 0) for _ in range(3)), Message("%DLQ%billing", b"d", 0))
    put(store, *(Message("orders", b"later", 0, {"DELAY": str(level)}) for level in (1, 1, 1, 3)))
    put(store, *(Message(HALF_TOPIC, b"h", 0) for _ in range(5)))
    put(store, Message(OP_TOPIC, b"1", 0, {"TAGS": "d"}), Message(OP_TOPIC, b"3,4,", 0, {"TAGS": "d"}))


def write_state(root: Path) -> None:
    """RocketMQ's files: groups, offsets, delay progress, an impossible topic, a filter."""
    (root / "config").mkdir(exist_ok=True)
    topic = {"topicName": "orders", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    for name, content in {
        "topics.json": {"topicConfigTable": {"orders": topic, "none": {**topic, "readQueueNums": 0}}},
        "consumerOffset.json": {"offsetTable": {"orders@billing": {"0": 1, "1": 2}}},
        "delayOffset.json": {"offsetTable": {"1": 2}},
        "subscriptionGroup.json": {"subscriptionGroupTable": {"billing": {}, "audit": {"consumeEnable": False}}},
        "consumerFilter.json": {
            "filterDataByTopic": {
                "orders": {
                    "groupFilterData": {
                        "billing": {"expressionType": "SQL92", "expression": "a > 1", "deadTime": 0},
                        "gone": {"expressionType": "SQL92", "expression": "a > 1", "deadTime": 9},
                    }
                }
            }
        },
    }.items():
        (root / "config" / name).write_text(json.dumps(content))


@pytest.fixture(params=[False, True], ids=["plain", "member"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> MessageStoreConfig:
    """A stopped broker's directory, plain or a member's."""
    config = small_config(tmp_path / "root", enable_dledger_commit_log=request.param)
    with master(config) if request.param else running(config) as store:
        fill(store)
    shutil.rmtree(config.config_dir, ignore_errors=True)
    write_state(config.store_path_root_dir)
    return config


def test_topics_and_what_waits_are_counted(stored: MessageStoreConfig) -> None:
    """Messages by topic and queue; delayed ones behind the progress; halves without an op; groups and offsets."""
    found = survey(stored.store_path_root_dir)

    counts = {one.name: (one.messages, len(one.queues)) for one in by_size(found)}
    assert counts["orders"] == (20, 3)
    assert counts["%RETRY%billing"] == (3, 1)
    assert counts[SCHEDULE_TOPIC] == (4, 2)
    assert found.delayed == {1: 1, 3: 1}
    assert found.open_halves == 2
    assert found.groups == {"billing", "audit"}
    assert found.offsets == 2
    assert found.damaged == []
    assert found.is_member is stored.enable_dledger_commit_log


def test_what_comes_along_and_what_does_not_is_said(stored: MessageStoreConfig) -> None:
    """In sentences with numbers."""
    config = stored.store_path_root_dir / "config"
    (config / "consumerOrderInfo.json").write_text('{"orderedConsumptionLevel":"QUEUE","table":{}}')
    (config / "topicQueueMapping.json").write_text('{"dataVersion":{"counter":1},"topicQueueMappingInfoMap":{"S":{}}}')

    found = survey(stored.store_path_root_dir)

    comes, stays = "\n".join(found.comes), "\n".join(found.stays)
    assert "consumer groups (2) with their offsets (2)" in comes
    assert "messages to be tried again: 3" in comes
    assert "messages that were given up (dead letters): 1" in comes
    assert "delayed messages that still wait: 2" in comes
    assert "about which producers are asked: 2" in comes
    assert "topics that are not possible here: none" in stays
    assert "SQL92 filters of groups (billing), which their consumers tell" in comes
    assert "SQL92" not in stays
    assert "topicQueueMapping.json: static topics" in stays
    assert "consumerOrderInfo.json" not in stays
    assert found.comes[0].startswith("all messages (")


def test_what_stays_does_not_come_along(tmp_path: Path) -> None:
    """Messages of RocketMQ 5 that nobody would get are not counted among those that come, wherever they are known."""
    config = small_config(tmp_path / "root")
    with running(config) as store:
        put(
            store, Message("orders", b"x", 0), Message("Batches", b"ten", 0, sys_flag=0x80), Message("Other", b"ten", 0)
        )
        put(store, Message(TIMER_TOPIC, b"later", 0), Message(TIMER_TOPIC, b"later", 0))
    (tmp_path / "root" / "batchconsumequeue" / "Other").mkdir(parents=True)

    found = survey(tmp_path / "root")

    assert found.messages == 1
    assert found.comes[0] == "messages (1) of topics (1), with their queue offsets; NOT those named below"
    stays = "\n".join(found.stays)
    assert "up to 2 messages" in stays
    assert "Batches, Other" in stays


def test_only_a_log_of_rocketmq_needs_import_unchecked(tmp_path: Path) -> None:
    """A member without our identity, or that RocketMQ has used since."""
    config = small_config(tmp_path / "root", enable_dledger_commit_log=True)
    with master(config) as store:
        put(store, Message("orders", b"x", 0))
    (node,) = tmp_path.glob("root/dledger-*")
    assert survey(tmp_path / "root").todo == []
    assert survey(node).messages == survey(tmp_path / "root").messages > 0

    (node / "checkpoint.bak").touch()
    assert "import_unchecked=true" in survey(node).todo[0]
    (node / "checkpoint.bak").unlink()
    (node / "identity").unlink()
    assert "import_unchecked=true" in survey(tmp_path / "root").todo[0]


def test_damage_is_found_and_a_torn_end_is_not_damage(stored: MessageStoreConfig) -> None:
    """The first bad place, in the middle; at the end of a plain log the next start cuts."""
    root = stored.store_path_root_dir
    directory = next(root.glob("dledger-*/data"), root / "commitlog")
    first = min(directory.iterdir())
    data = bytearray(first.read_bytes())
    at = data.index(b"later")
    data[at] ^= 1
    first.write_bytes(data)

    found = survey(root)

    if stored.enable_dledger_commit_log:
        assert "CRC" in found.damaged[0].reason
    else:
        assert found.damaged == []
        assert "the first start cuts what follows" in found.todo[0]
    (directory / f"{len(data):020d}").write_bytes(bytes(data))
    assert survey(root).damaged


@pytest.mark.parametrize("name", ["plain", "killed", "dledger"])
def test_directories_that_rocketmq_wrote_are_read(tmp_path: Path, name: str) -> None:
    """All messages, as many as RocketMQ itself read back; only a member needs ``import_unchecked``."""
    root, lines = open_golden(name, tmp_path)
    records = [one for one in map(json.loads, lines) if one["kind"] == "record"]

    found = survey(root)

    assert found.messages == len(records) == 194
    assert found.damaged == []
    assert sum(found.delayed.values()) == 8
    assert found.is_member is found.is_foreign is (name == "dledger")
    assert any("import_unchecked" in one for one in found.todo) is found.is_member


def test_a_ledger_without_messages_is_not_a_brokers(tmp_path: Path) -> None:
    """It is no damage that its entries are something else."""
    root, _ = open_golden(LEDGER, tmp_path)

    with pytest.raises(ConfigError, match="does not begin with a broker's message"):
        survey(root)


def run(*arguments: object) -> Result:
    """``dledger upgrade check --from``."""
    return CliRunner().invoke(main, ["upgrade", "check", "--from", *map(str, arguments)])


def test_the_command_prints_all_of_it(stored: MessageStoreConfig) -> None:
    """With exit code 0, also as JSON."""
    shown = run(stored.store_path_root_dir)

    assert shown.exit_code == 0, shown.output
    assert "comes along: SQL92 filters of groups (billing)" in shown.output
    assert "delay level 3: 1 messages wait" in shown.output
    found = json.loads(run(stored.store_path_root_dir, "--json").output)
    assert (found["ok"], found["open_transactions"], found["delayed_waiting"]) == (True, 2, {"1": 1, "3": 1})


def test_the_conf_file_is_judged(stored: MessageStoreConfig, tmp_path: Path) -> None:
    """Settings without effect are named; those that keep a broker from starting give exit code 1."""
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=a\nsendThreadPoolQueueCapacity=5\n")
    assert "conf file: settings that change nothing here: sendThreadPoolQueueCapacity" in (
        run(stored.store_path_root_dir, "-c", conf).output
    )
    conf.write_text("brokerName=a\nenablePropertyFilter=false\n")
    assert "DOES NOT come along: SQL92 filters of groups (billing)" in (
        run(stored.store_path_root_dir, "-c", conf).output
    )
    conf.write_text("brokerName=a\nfileReservedTime=many\n")
    shown = run(stored.store_path_root_dir, "-c", conf)
    assert shown.exit_code == 1
    assert "conf file, REFUSED: " in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{0}/nowhere",), "is not a directory"),
        (("{0}",), "is not a broker's directory"),
        (("{0}", "--align"), "--from looks at one directory by itself"),
        (("{0}", "--nodes", "{0}"), "--from looks at one directory by itself"),
    ],
)
def test_wrong_usage_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    """With exit code 2 and a sentence."""
    shown = run(*(one.format(tmp_path) for one in arguments))

    assert shown.exit_code == 2
    assert said in shown.output


def test_two_members_in_one_directory_are_told_apart(tmp_path: Path) -> None:
    """The user has to name one."""
    for node in ("dledger-n0", "dledger-n1"):
        (tmp_path / node / "data").mkdir(parents=True)
        (tmp_path / node / "data" / f"{0:020d}").write_bytes(b"x" * 100)

    with pytest.raises(ConfigError, match="holds 2 members' logs"):
        survey(tmp_path)
