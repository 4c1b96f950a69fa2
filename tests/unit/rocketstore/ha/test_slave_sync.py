"""What a slave takes over from a master of RocketMQ besides its log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.remoting.client import RemotingClient, UnreachableError
from dledger.remoting.frame import Frame
from dledger.rpc import loops
from rocketstore.ha.service import SlaveSync
from rocketstore.ha.slave import MasterView
from rocketstore.remoting.codes import RequestCode
from rocketstore.state.broker_state import BrokerState
from rocketstore.store.message_store import MessageStore
from rocketstore.types import BrokerRole
from tests.unit.rocketstore.commit_log.support import small_config
from tests.unit.rocketstore.ha.records import opened

THEIRS = MasterView("m:1", is_connected=True)
VERSION = b'"dataVersion":{"counter":3,"timestamp":1}'
TOPICS = b'{"topicConfigTable":{"T":{"order":false,"perm":6,"readQueueNums":4,"topicFilterType":"SINGLE_TAG",' \
    b'"topicName":"T","topicSysFlag":0,"writeQueueNums":4}},' + VERSION + b"}"  # fmt: skip
GROUPS = b'{"subscriptionGroupTable":{"g":{"groupName":"g","retryMaxTimes":3}},' + VERSION + b"}"


class Master(RemotingClient):
    """Answers as told."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = {
            RequestCode.GET_ALL_TOPIC_CONFIG: Frame(0, 0, body=TOPICS),
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Frame(0, 0, body=GROUPS),
            RequestCode.GET_ALL_CONSUMER_OFFSET: Frame(0, 0, body=b'{"offsetTable":{"T@g":{0:7,1:5}}}'),
            RequestCode.GET_ALL_DELAY_OFFSET: Frame(0, 0, body=b'{"offsetTable":{3:12}}'),
        }
        self.asked: list[int] = []

    async def call(self, address: str, frame: Frame, timeout_s: float) -> Frame:
        """The answer to one request."""
        assert address == "m:0"
        assert timeout_s > 0
        self.asked.append(frame.code)
        if not self.answers:
            raise UnreachableError("nobody is there")
        return self.answers[RequestCode(frame.code)]


class Slave:
    """A slave's state, and what it asks."""

    def __init__(self, directory: Path) -> None:
        config = small_config(directory, broker_role=BrokerRole.SLAVE)
        self.store = MessageStore(config, opened(config))
        self.store.load()
        self.state = BrokerState(self.store, config.config_dir)
        self.state.load()
        self.client = Master()
        self.view = THEIRS
        self.sync = SlaveSync(self.state, self.client, lambda: self.view, lambda: "m:0")

    def round(self) -> None:
        """One round."""
        loops.run(self.sync.step())


@pytest.fixture
def slave(tmp_path: Path) -> Iterator[Slave]:
    one = Slave(tmp_path)
    yield one
    one.store.shutdown()


def test_it_takes_over_all_four(slave: Slave) -> None:
    """Topics, groups, offsets and delay progress, as the master has them."""
    slave.round()
    assert slave.sync.failure == ""
    topic = slave.state.topic("T")
    assert topic is not None
    assert topic.read_queues == 4
    assert slave.state.group("g").retry_times_max == 3
    assert [slave.state.offset("g", "T", queue) for queue in (0, 1, 2)] == [7, 5, -1]
    assert slave.state.delay_offset(3) == 12


def test_offsets_never_go_back(slave: Slave) -> None:
    """RocketMQ's slave takes what it is told: after a failover, groups consume again."""
    slave.round()
    slave.client.answers[RequestCode.GET_ALL_CONSUMER_OFFSET] = Frame(0, 0, body=b'{"offsetTable":{"T@g":{0:2,1:9}}}')
    slave.client.answers[RequestCode.GET_ALL_DELAY_OFFSET] = Frame(0, 0, body=b'{"offsetTable":{3:1,4:2}}')
    slave.round()
    assert [slave.state.offset("g", "T", queue) for queue in (0, 1)] == [7, 9]
    assert [slave.state.delay_offset(level) for level in (3, 4)] == [12, 2]


def test_one_offset_of_minus_one_does_not_hold_back_the_others(slave: Slave, caplog: pytest.LogCaptureFixture) -> None:
    """RocketMQ's master stores what clients commit, also -1: that is none, and said once."""
    slave.client.answers[RequestCode.GET_ALL_CONSUMER_OFFSET] = Frame(
        0, 0, body=b'{"offsetTable":{"T@g":{0:7,1:-1},"T@h":{0:-1}}}'
    )
    slave.round()
    slave.round()
    assert slave.sync.failure == ""
    assert [slave.state.offset("g", "T", queue) for queue in (0, 1)] == [7, -1]
    assert slave.state.topic("T") is not None
    assert caplog.text.count("offset of group g in T, queue 1: -1, which is none") == 1


def test_what_the_master_has_deleted_is_gone(slave: Slave) -> None:
    """A topic that it does not list any more."""
    slave.round()
    slave.client.answers[RequestCode.GET_ALL_TOPIC_CONFIG] = Frame(0, 0, body=b'{"topicConfigTable":{}}')
    slave.round()
    assert slave.state.topics() == []


@pytest.mark.parametrize("code", list(Master().answers))
@pytest.mark.parametrize("answer", [Frame(1, 0, remark="no"), Frame(0, 0, body=b"{"), Frame(0, 0, body=b"[]")])
def test_half_of_it_is_nothing(slave: Slave, code: RequestCode, answer: Frame) -> None:
    """If one answer is unusable, nothing changes, and the reason is kept."""
    optional = code in (RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_DELAY_OFFSET)
    slave.client.answers[code] = answer
    slave.round()
    if optional and not answer.body:
        assert slave.state.topic("T") is not None  # RocketMQ's way to say that there are none
        return
    assert slave.sync.failure
    assert slave.state.topics() == []
    assert slave.state.groups() == []


def test_a_master_that_is_away_changes_nothing(slave: Slave) -> None:
    """What was taken over stays."""
    slave.round()
    slave.client.answers.clear()
    slave.round()
    assert "nobody is there" in slave.sync.failure
    assert slave.state.topic("T") is not None


@pytest.mark.parametrize("view", [None, MasterView("m:1", is_connected=True, is_ours=True), MasterView("m:1")])
def test_only_a_connected_master_of_rocketmq_is_asked(slave: Slave, view: MasterView | None) -> None:
    """Ours has it in the log, which would be contradicted."""
    slave.sync = SlaveSync(slave.state, slave.client, lambda: view, lambda: "m:0")
    slave.round()
    assert slave.client.asked == []
