"""mqadmin's commands with our cluster and with RocketMQ's in the same state print the same: ``make interop``.

Both are two groups of three behind a name server, brought to their state by the same commands. What differs on purpose
is in docs/rocketmq.md.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest

from tests.interop import java, rocketmq
from tests.interop.admin_session import AdminSession, admin_session
from tests.interop.comparing import comparable
from tests.interop.whole_clusters import CLUSTER, GROUPS, WholeCluster, ours, rocketmqs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

TOPIC: Final = "Orders"
ONLINE: Final = "interop-consumers"
OFFLINE: Final = "billing"
PRODUCERS: Final = "interop-transactions"
START_TIMEOUT_S: Final = 180
PREPARED: Final = (
    f"updateTopic -c {CLUSTER} -t {TOPIC} -r 4 -w 4",
    "updateTopic -b {A} -t OnlyA -r 2 -w 2",
    f"updateTopic -c {CLUSTER} -t ReadOnly -r 4 -w 2 -p 4 -o true",
    f"updateTopic -c {CLUSTER} -t Unit -u true -s true",
    f"updateTopic -c {CLUSTER} -t %RETRY%{ONLINE} -r 1 -w 1",
    f"updateTopic -c {CLUSTER} -t %RETRY%{OFFLINE} -r 2 -w 2",
    f"updateTopic -c {CLUSTER} -t %RETRY%TOOLS_CONSUMER -r 1 -w 1",  # made by commands that take more than a second
    f"updateSubGroup -c {CLUSTER} -g {ONLINE}",
    f"updateSubGroup -c {CLUSTER} -g {OFFLINE} -r 3 -q 2 -s true -m false -d false -i 0 -w 1 -a true",
    "updateSubGroup -b {A} -g onlya",
    f"sendMessage -t {TOPIC} -p 1 -k key1 -c TagA -b interop-a -i 0",
    f"sendMessage -t {TOPIC} -p 2 -k key1 -b interop-a -i 0",
    f"sendMessage -t {TOPIC} -p 3 -k key2 -c TagB -b interop-b -i 3",
)
"""``{A}``: the address of the first group's master."""
LATER: Final = (
    f"cloneGroupOffset -s {ONLINE} -d {OFFLINE} -t {TOPIC} -o true",
    f"sendMessage -t {TOPIC} -p 4 -k key3 -b interop-a -i 0",
)
"""Once the consumers have consumed all: the group that is offline misses one message."""
READING: Final = (
    "clusterList",
    "clusterList -m",
    f"topicStatus -t {TOPIC}",
    "topicStatus -t TBW102",
    "topicStatus -t ReadOnly",
    "topicStatus -t nothere",
    f"topicRoute -t {TOPIC}",
    f"topicRoute -t {TOPIC} -l",
    "topicRoute -t ReadOnly",
    "topicRoute -t Unit",
    "topicRoute -t nothere",
    "topicList",
    "topicList -c",
    f"topicClusterList -t {TOPIC}",
    "topicClusterList -t nothere",
    f"allocateMQ -t {TOPIC} -i 10.0.0.1,10.0.0.2",
    "consumerProgress",
    f"consumerProgress -g {ONLINE}",
    f"consumerProgress -g {ONLINE} -s true",
    f"consumerProgress -g {OFFLINE}",
    "consumerProgress -g nothere",
    f"consumerConnection -g {ONLINE}",
    f"consumerConnection -g {ONLINE} -b {{A}}",
    "consumerConnection -g nothere",
    f"producerConnection -g {PRODUCERS} -t {TOPIC}",
    f"producerConnection -g nothere -t {TOPIC}",
    "producer -b {A}",
    f"consumerStatus -g {ONLINE}",
    f"consumerStatus -g {ONLINE} -s",
    "consumerStatus -g nothere",
    f"getConsumerConfig -g {OFFLINE}",
    "getConsumerConfig -g onlya",
    "getConsumerConfig -g nothere",
    "brokerConsumeStats -b {A}",
    "brokerConsumeStats -b {A} -l 1",
    "brokerConsumeStats -b {A} -o true",
    "statsAll",
    f"statsAll -t {TOPIC}",
    f"queryMsgByKey -t {TOPIC} -k key1",
    f"queryMsgByKey -t {TOPIC} -k nokey",
    "queryMsgByKey -t nothere -k key1",
    f"queryMsgByUniqueKey -t {TOPIC} -i {{unique}}",
    f"queryMsgByUniqueKey -t {TOPIC} -i {{unique}} -a",
    f"queryMsgByUniqueKey -t {TOPIC} -i {'7F' * 16}",
    "queryMsgById -i {offset}",
    f"queryMsgByOffset -t {TOPIC} -b interop-a -i 0 -o 1",
    f"queryMsgByOffset -t {TOPIC} -b interop-a -i 0 -o 99",
    f"queryMsgByOffset -t {TOPIC} -b interop-a -i 9 -o 0",
    f"printMsg -t {TOPIC}",
    f"printMsg -t {TOPIC} -s TagA",
    "printMsg -t nothere",
    f"printMsgByQueue -t {TOPIC} -a interop-a -i 0 -p true -d true",
    f"printMsgByQueue -t {TOPIC} -a interop-a -i 0 -f true",
    f"consumeMessage -t {TOPIC}",
    f"consumeMessage -t {TOPIC} -b interop-b -i 3 -o 0 -c 1",
    "consumeMessage -t nothere",
    f"queryCq -t {TOPIC} -q 0 -i 0 -c 5 -b {{A}}",
    f"queryCq -t {TOPIC} -q 9 -i 0 -c 5 -b {{A}}",
    f"queryCq -t {TOPIC} -q 0 -i 0 -c 5 -b {{A}} -g nothere",
    "getNamesrvConfig",
    f"queryMsgById -i {{offset}} -g {ONLINE} -d {{client}}",
    f"consumerStatus -g {ONLINE} -i {{client}}",
)
TRACED: Final = "sendMessage -t Timed -p 9 -k traced -m true -b interop-a -i 0"
TRACE: Final = "queryMsgTraceById -i {unique}"
CHANGING: Final = {
    "topics": (
        f"updateTopic -c {CLUSTER} -t Changed -r 4 -w 4",
        f"updateTopicPerm -t Changed -p 4 -c {CLUSTER}",
        "topicRoute -t Changed",
        "updateTopicPerm -t Changed -p 6 -b {A}",
        "topicRoute -t Changed",
        f"updateTopicPerm -t nothere -p 4 -c {CLUSTER}",
        f"updateTopic -c {CLUSTER} -t Changed -r 8 -w 8",
        "topicStatus -t Changed",
        "updateTopic -c nocluster -t Changed",
        "updateOrderConf -t Changed -v interop-a:4 -m put",
        "updateOrderConf -t Changed -m get",
        "topicRoute -t Changed",
        "updateOrderConf -t Changed -m delete",
        "updateOrderConf -t Changed -m get",
        f"deleteTopic -c {CLUSTER} -t Changed",
        "topicRoute -t Changed",
        "topicStatus -t Changed",
        "topicList",
        f"deleteTopic -c {CLUSTER} -t nothere",
        f"deleteTopic -c {CLUSTER} -t TBW102",
        f"updateTopic -c {CLUSTER} -t TBW102",
        f"updateTopic -c {CLUSTER} -t SCHEDULE_TOPIC_XXXX",
        f"updateTopic -c {CLUSTER} -t bad!name",
    ),
    "groups": (
        f"updateSubGroup -c {CLUSTER} -g changed -r 3",
        f"updateSubGroup -c {CLUSTER} -g changed -r 5 -s false",
        "getConsumerConfig -g changed",
        f"deleteSubGroup -c {CLUSTER} -g changed -r true",
        "getConsumerConfig -g changed",
        f"deleteSubGroup -c {CLUSTER} -g nothere",
    ),
    "offsets": (
        f"updateSubGroup -c {CLUSTER} -g reset",
        f"updateTopic -c {CLUSTER} -t %RETRY%reset -r 1 -w 1",
        f"resetOffsetByTime -g reset -t {TOPIC} -s -1",
        f"cloneGroupOffset -s {ONLINE} -d reset -t {TOPIC} -o true",
        "consumerProgress -g reset",
        f"resetOffsetByTime -g reset -t {TOPIC} -s 1000000000000",
        "consumerProgress -g reset",
        f"skipAccumulatedMessage -g reset -t {TOPIC}",
        "consumerProgress -g reset",
        f"cloneGroupOffset -s nothere -d reset -t {TOPIC} -o true",
        f"deleteSubGroup -c {CLUSTER} -g reset -r true",
        f"resetOffsetByTime -g {ONLINE} -t {TOPIC} -s -1",
    ),
    "name servers": (
        "wipeWritePerm -b interop-a",
        f"topicRoute -t {TOPIC}",
        "addWritePerm -b interop-a",
        f"topicRoute -t {TOPIC}",
        "topicRoute -t ReadOnly",
        "wipeWritePerm -b nothere",
        "updateKvConfig -s ns -k k -v v",
        "deleteKvConfig -s ns -k k",
        "deleteKvConfig -s ns -k nothing",
        "updateNamesrvConfig -k orderMessageEnable -v true",
    ),
    "brokers": (
        "updateBrokerConfig -b {A} -k autoCreateTopicEnable -v true",
        f"updateBrokerConfig -c {CLUSTER} -k autoCreateTopicEnable -v true",
        "updateBrokerConfig -b {A} -k brokerPermission -v 4",
        f"topicRoute -t {TOPIC}",
        "updateBrokerConfig -b {A} -k brokerPermission -v 6",
        f"topicRoute -t {TOPIC}",
        "cleanExpiredCQ -b {A}",
        f"cleanExpiredCQ -c {CLUSTER}",
        "cleanUnusedTopic -b {A}",
        f"cleanUnusedTopic -c {CLUSTER}",
        "deleteExpiredCommitLog -b {A}",
    ),
    "messages": (
        "sendMsgStatus -b interop-a -c 2",
        "topicStatus -t interop-a",
        "topicRoute -t interop-a",
        f"updateTopic -c {CLUSTER} -t Timed -r 1 -w 1",
        "checkMsgSendRT -t Timed -a 2 -s 10",
        "sendMessage -t Fresh -p 9 -b interop-a -i 0",
        "topicStatus -t Fresh",
        "sendMessage -t Timed -p 9 -b interop-a -i 17",
        "sendMessage -t SCHEDULE_TOPIC_XXXX -p 9",
        TRACED,
    ),
}
"""What has an effect, and what shows it."""
REFUSED: Final = {
    "sendMessage -t ReadOnly -p 9 -b interop-a -i 0": 16,
    f"updateTopic -c {CLUSTER} -t Big -r 2000 -w 2000": 1,
    f"updateTopic -c {CLUSTER} -t Empty -r 0 -w 0": 1,
    f"updateSubGroup -c {CLUSTER} -g bad!group": 1,
    "updateNamesrvConfig -k clusterTest -v true": 16,
    "updateBrokerConfig -b {A} -k nosuchsetting -v 1": 1,
    "updateBrokerConfig -b {A} -k fileReservedTime -v 6": 16,
}
"""What RocketMQ takes and we do not, and our code."""
ACCESS: Final = {
    "updateAclConfig -b {A} -a abc -s def12345678": 209,
    "deleteAclConfig -b {A} -a abc": 210,
    "updateGlobalWhiteAddr -b {A} -g 10.1.1.1": 211,
}
"""Both refuse, as RocketMQ has no access rules here; its code. Ours is always 3."""
ELSEWHERE: Final = {
    "brokerStatus": "below",
    "getBrokerConfig": "below",
    "clusterAclConfigVersion": "RocketMQ does not answer without access rules",
    "clusterRT": "below",
    "exportConfigs": "below",
    "exportMetadata": "below",
    "exportMetrics": "below",
    "startMonitoring": "prints nothing, and does not end",
}
_ALLOWED: Final[tuple[tuple[str, str, str | None], ...]] = (
    ("topicList", r"^(?:Interop )?BenchmarkTest$", None),
    ("statsAll", r"^BenchmarkTest .*$", None),
    ("statsAll", r"(NUMBER NUMBER|NUMBER) \d+ (\d+|NO_CONSUMER)$", r"\1"),  # RocketMQ's counts begin after an hour
    ("wipeWritePerm", r"OK, \d+$", "OK"),  # without BenchmarkTest's
    ("addWritePerm", r"OK, \d+$", "OK"),
    ("queryMsgByUniqueKey", r"^Message Body Path: .*", "PATH"),
    ("getNamesrvConfig", r"^(?!orderMessageEnable ).*$", None),  # settings of its own
)
"""Differences that docs/rocketmq.md gives the reasons of: lines left out, or parts of them."""


@dataclass
class Both:
    """The clusters, and mqadmin."""

    ours: WholeCluster
    rocketmqs: WholeCluster
    admin: AdminSession
    ids: dict[str, dict[str, str]] = field(default_factory=dict)
    """What else may stand for words of commands, by the cluster's name."""

    def run(self, command: str, cluster: WholeCluster) -> str:
        """What is printed."""
        words = {"A": cluster.master(GROUPS[0]), **self.ids.get(cluster.name, {})}
        return self.admin(*command.format(**words).split(" "), "-n", cluster.name_server)

    def lines(self, command: str) -> tuple[list[str], list[str]]:
        """Ours and RocketMQ's, without what may differ."""
        found = []
        for cluster in (self.ours, self.rocketmqs):
            lines = comparable(self.run(command, cluster), cluster)
            for of, pattern, instead in _ALLOWED:
                if command.startswith(of):
                    if instead is None:
                        lines = [one for one in lines if not re.search(pattern, one)]
                    else:
                        lines = [re.sub(pattern, instead, one) for one in lines]
            found.append(sorted(lines))
        return found[0], found[1]

    def compare(self, command: str) -> None:
        """They are the same."""
        ours_, theirs = self.lines(command)
        assert ours_ == theirs, f"{command}:\n" + "\n".join(difflib.unified_diff(theirs, ours_, "theirs", "ours", n=0))

    def wait_for(self, command: str, pattern: str) -> None:
        """Both clusters print it."""
        for cluster in (self.ours, self.rocketmqs):
            wait_until(partial(self._prints, command, cluster, pattern), pattern, START_TIMEOUT_S, poll_s=0.5)

    def _prints(self, command: str, cluster: WholeCluster, pattern: str) -> bool:
        return re.search(pattern, self.run(command, cluster), re.DOTALL) is not None


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """In the same state, with a producer and a consumer each."""
    java.build()
    directory = tmp_path_factory.mktemp("both")
    with ExitStack() as stack:
        found = Both(
            stack.enter_context(ours(directory / "ours")),
            stack.enter_context(rocketmqs(directory / "rocketmqs")),
            stack.enter_context(admin_session(directory / "admin")),
        )
        for command in PREPARED:
            found.compare(command)
        for cluster in (found.ours, found.rocketmqs):
            address, home = cluster.name_server, cluster.directory / "clients"
            stack.enter_context(rocketmq.waiting_consumer(home, address, TOPIC))
            stack.enter_context(rocketmq.open_client(home, "transact", address, TOPIC, "0"))
        # each queue has been asked for, and all its messages are consumed
        found.wait_for(f"consumerProgress -g {ONLINE}", rf"(?:{TOPIC} .*?){{8}}Diff Total: 0")
        for command in LATER:
            found.compare(command)
        found.wait_for(f"consumerProgress -g {ONLINE}", rf"{TOPIC}\s+interop-a\s+0\s+3\s+3\s+0.*Diff Total: 0")
        for cluster in (found.ours, found.rocketmqs):
            connected = found.run(f"consumerConnection -g {ONLINE}", cluster)
            message = found.run(f"queryMsgByOffset -t {TOPIC} -b interop-a -i 0 -o 1", cluster)
            found.ids[cluster.name] = {
                "client": re.findall(r"^(\S+@\S+) ", connected, re.MULTILINE)[0],
                "unique": re.findall(r"UNIQ_KEY=(\w+)", message)[0],
                "offset": re.findall(r"OffsetID: +(\w+)", message)[0],
            }
        found.wait_for(f"producerConnection -g {PRODUCERS} -t {TOPIC}", "JAVA")
        yield found


def test_what_brokers_say_of_themselves(both: Both) -> None:
    """All that RocketMQ's say but what no tool asks for; the totals are those of users' messages, on every member.

    Before tests that let RocketMQ note that an offset has moved, as a message.
    """
    totals = ("msgPutTotalTodayNow", "putMessageTimesTotal", "putMessageSizeTotal", "remainHowManyDataToFlush")
    ours_, theirs = (
        {
            (at, key): value
            for at, key, value in (
                re.findall(r"^(\S+) (\S+?)\s*:(.*)$", line)[0]
                for line in comparable(both.run(f"brokerStatus -c {CLUSTER}", cluster), cluster)
            )
        }
        for cluster in (both.ours, both.rocketmqs)
    )
    unknown = {key for _, key in theirs.keys() - ours_.keys()}
    left_out = {"commitLogDirCapacity", "putLatency99", "putLatency999", "remainTransientStoreBufferNumbs"}
    assert {one for one in unknown if not one.startswith("commitLogDiskRatio_")} == left_out
    for place, value in theirs.items():
        if place[1] in totals:
            assert (place, ours_[place]) == (place, value)


@pytest.mark.parametrize("command", READING)
def test_what_reads(both: Both, command: str) -> None:
    both.compare(command)


def test_what_is_set(both: Both) -> None:
    """Where both have a setting of that name, and it was given in the conf file or has one meaning."""
    ours_, theirs = (
        dict(re.findall(r"^(\w+)\s+=  (.*)$", both.run("getBrokerConfig -b {A}", cluster), re.MULTILINE))
        for cluster in (both.ours, both.rocketmqs)
    )
    own = {name for name in ours_.keys() & theirs.keys() if ours_[name] != theirs[name]}
    assert own == OWN_SETTINGS, {name: (ours_.get(name), theirs.get(name)) for name in own ^ OWN_SETTINGS}


OWN_SETTINGS: Final = frozenset(
    [
        "cleanFileForciblyEnable",
        "dLegerPeers",
        "enablePropertyFilter",
        "listenPort",
        "maxTransferBytesOnMessageInDisk",
        "maxTransferBytesOnMessageInMemory",
        "maxTransferCountOnMessageInDisk",
        "maxTransferCountOnMessageInMemory",
        "messageIndexSafe",
        "namesrvAddr",
        "registerNameServerPeriod",
        "storePathRootDir",
    ]
)
"""Addresses, directories, and where our defaults are others (docs/configuration.md)."""


@pytest.mark.parametrize("command", ["exportMetadata", "exportConfigs", "exportMetrics"])
def test_what_is_exported(both: Both, command: str) -> None:
    """The same members, and the same values but for times, rates and addresses."""
    found = []
    for cluster in (both.ours, both.rocketmqs):
        place = cluster.directory / "export"
        both.run(f"{command} -c {CLUSTER} -f {place}", cluster)
        file = place / f"{command.removeprefix('export').lower()}.json"
        exported = json.loads(file.read_text())
        if command == "exportMetadata":
            exported["topicConfigTable"].pop("BenchmarkTest", None)
        found.append(comparable(json.dumps(exported, indent=1, sort_keys=True), cluster))
    assert found[0] == found[1]


@pytest.mark.parametrize("what", CHANGING)
def test_what_changes(both: Both, what: str) -> None:
    for command in CHANGING[what]:
        both.compare(command)


def test_a_trace_is_looked_for(both: Both) -> None:
    """Where there are some, so that their topic exists. A sender that ends drops its trace after half a second."""

    def has_traces(cluster: WholeCluster) -> bool:
        both.run(TRACED, cluster)
        return "RMQ_SYS_TRACE_TOPIC" in both.run("topicList", cluster)

    for cluster in (both.ours, both.rocketmqs):
        wait_until(partial(has_traces, cluster), f"a trace is stored: {cluster.name}", START_TIMEOUT_S)
    both.compare(TRACE)


def test_how_long_sending_takes(both: Both) -> None:
    """``clusterRT`` goes on until it is killed: one row for each group."""
    for cluster in (both.ours, both.rocketmqs):
        words = ("clusterRT", "-a", "2", "-i", "1", "-c", CLUSTER, "-n", cluster.name_server)
        with rocketmq.open_admin(cluster.directory / "rt", *words) as printed:
            wait_until(partial(_has_rows, printed), f"rows of both groups: {cluster.name}", START_TIMEOUT_S)


def _has_rows(printed: Callable[[], str]) -> bool:
    rows = (rf"^{CLUSTER}\s+{group}\s+[\d.]+\s+2\s+0\s*$" for group in GROUPS)
    return all(re.search(row, printed(), re.MULTILINE) for row in rows)


@pytest.mark.parametrize("command", ACCESS)
def test_access_rules_are_no_commands(both: Both, command: str) -> None:
    assert "CODE: 3 " in both.run(command, both.ours)
    assert f"CODE: {ACCESS[command]} " in both.run(command, both.rocketmqs)


@pytest.mark.parametrize("command", REFUSED)
def test_what_only_rocketmq_takes(both: Both, command: str) -> None:
    assert f"CODE: {REFUSED[command]} " in both.run(command, both.ours)
    assert "CODE: " not in both.run(command, both.rocketmqs)


def test_every_command_is_there(both: Both) -> None:
    """Of mqadmin's own list."""
    ran = {one.split(" ")[0] for one in (*PREPARED, *LATER, *READING, *REFUSED, *ACCESS, TRACE)}
    ran |= {one.split(" ")[0] for commands in CHANGING.values() for one in commands}
    names = set(both.admin("names").split())
    assert names - ran == ELSEWHERE.keys(), sorted((names - ran) ^ ELSEWHERE.keys())
