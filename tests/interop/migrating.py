"""Brokers of either side with the same conf files, one after the other; all must serve what is written on any."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal

from dledger.remoting.fastjson import loads
from dledger.remoting.frame import Frame
from rocketstore.client.aio.received import split_records
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from tests.interop import rocketmq
from tests.support import known
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.support.waiting import wait_until

Side = Literal["java", "ours"]
TOPIC: Final = "Orders"
LATER: Final = "Later"
PAID: Final = "Paid"
GROUP: Final = "readers"
QUEUES: Final = 4
RETRIES: Final = 3
TIMEOUT_S: Final = 180
_COMMIT: Final = 8
_PREPARED: Final = 4
_SUBSCRIPTION: Final = 4
_MARK: Final = "import_unchecked=true\n"


class Broker:
    """A broker's conf file and root; either side runs it."""

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self.directory = directory
        self.port = rocketmq.broker_port()
        self.root = directory / "store"
        self.conf = directory / "broker.conf"
        self.settings: dict[str, object] = {
            "brokerClusterName": "Migrating",
            "brokerName": "moving",
            "listenPort": self.port,
            "storePathRootDir": self.root,
            "mappedFileSizeCommitLog": 8 << 20,
            "brokerIP1": "127.0.0.1",
            "diskMaxUsedSpaceRatio": 95,
            "registerNameServerPeriod": 10_000,
        } | dict(settings)

    @contextmanager
    def running(self, side: Side, *, import_unchecked: bool = False) -> Iterator[subprocess.Popen[bytes]]:
        """The process meanwhile; killed at the end, if it has not ended."""
        if side == "java":
            with rocketmq.broker(self.directory, self.settings) as process:
                yield process
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{name}={value}\n" for name, value in self.settings.items())
        self.conf.write_text(lines + _MARK * import_unchecked)
        command = [sys.executable, "-m", "dledger_cli.entry", "broker", "-c", str(self.conf)]
        with (self.directory / "ours.out").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def is_master(self) -> bool:
        """Whether it takes messages and is registered as master; our slaves pass messages on."""
        try:
            with RemotingSocket(self.port) as client:
                address = known.brokers(str(self.settings["namesrvAddr"])).get("moving", {}).get(0)
                return address == f"127.0.0.1:{self.port}" and client.send("Probe", b"probe").code == 0
        except (OSError, EOFError):
            return False


def group_of(directory: Path, size: int, name_server: str) -> list[Broker]:
    """The members of a group."""
    raft = [rocketmq.broker_port() for _ in range(size)]
    peers = ";".join(f"n{number}-127.0.0.1:{port}" for number, port in enumerate(raft))
    return [
        Broker(
            directory / f"n{number}",
            {
                "namesrvAddr": name_server,
                "enableDLegerCommitLog": "true",
                "dLegerGroup": "moving",
                "dLegerPeers": peers,
                "dLegerSelfId": f"n{number}",
            },
        )
        for number in range(size)
    ]


@contextmanager
def served(brokers: Sequence[Broker], side: Side, *, import_unchecked: bool = False) -> Iterator[Broker]:
    """The brokers meanwhile; gives the one that takes messages. Stopped at the end as administrators stop them."""
    with ExitStack() as stack:
        processes = [stack.enter_context(one.running(side, import_unchecked=import_unchecked)) for one in brokers]
        masters: list[Broker] = []

        def someone_is() -> bool:
            ended = [one for one in processes if one.poll() is not None]
            assert not ended, "\n".join(path.read_text() for path in brokers[0].directory.parent.rglob("*.out"))
            masters[:] = [one for one in brokers if one.is_master()]
            return bool(masters)

        wait_until(someone_is, f"a broker of {side} takes messages", TIMEOUT_S, poll_s=0.5)
        yield masters[0]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(TIMEOUT_S)


class Books:
    """What was written, and must be there whoever serves it."""

    def __init__(self) -> None:
        self.messages: dict[int, list[bytes]] = defaultdict(list)
        """Of ``TOPIC``, by queue."""
        self.later: list[bytes] = []
        self.paid: list[bytes] = []
        self.stages = 0

    def begin(self, broker: Broker) -> None:
        """Make the topics and the group."""
        with RemotingSocket(broker.port) as client:
            for topic in (TOPIC, LATER, PAID):
                fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": QUEUES, "writeQueueNums": QUEUES}
                fields |= {
                    "perm": 6,
                    "topicFilterType": "SINGLE_TAG",
                    "topicSysFlag": int(topic == TOPIC),
                    "order": "false",
                }
                _done(client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))
            group = json.dumps({"groupName": GROUP, "retryMaxTimes": RETRIES}).encode()
            _done(client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, group))

    def write(self, broker: Broker) -> None:
        """Messages with keys, a delayed one, a transaction that is committed and one that is not, and offsets."""
        stage, self.stages = self.stages, self.stages + 1
        with RemotingSocket(broker.port) as client:
            for number in range(3 * QUEUES):
                queue_id, body = number % QUEUES, b"%d-%d" % (stage, number)
                _done(client.send(TOPIC, body, queue_id, properties=f"KEYS\x01key-{stage}-{number}"))
                self.messages[queue_id].append(body)
            _done(client.send(LATER, b"later-%d" % stage, properties="DELAY\x013"))
            self.later.append(b"later-%d" % stage)
            for end in (_COMMIT, 0):
                body = b"paid-%d-%d" % (stage, end)
                self._transact(client, body, end)
                self.paid += [body] * (end == _COMMIT)
            for queue_id in range(QUEUES):
                fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue_id, "commitOffset": 3 * stage + 1}
                _done(client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields))

    @staticmethod
    def _transact(client: RemotingSocket, body: bytes, end: int) -> None:
        properties = f"TRAN_MSG\x01true\x02PGROUP\x01payers\x02UNIQ_KEY\x01{body.decode()}"
        fields = send_fields(PAID, 0, properties) | {"a": "payers", "f": _PREPARED}
        half = _done(client.ask(RequestCode.SEND_MESSAGE_V2, fields, body))
        if end:
            place = {
                "tranStateTableOffset": half.fields["queueOffset"],
                "commitLogOffset": int(half.fields["msgId"][-16:], 16),
            }
            ending = {"producerGroup": "payers", "commitOrRollback": end, "fromTransactionCheck": "false"}
            names = {"msgId": body.decode(), "transactionId": body.decode()}
            client.tell(RequestCode.END_TRANSACTION, place | ending | names)

    def check(self, broker: Broker) -> None:
        """All of it is there: messages at their offsets, delayed and paid ones once, keys, offsets, topics, groups."""
        with RemotingSocket(broker.port) as client:
            for queue_id in range(QUEUES):
                _wait_for(client, TOPIC, queue_id, self.messages[queue_id])
                assert bodies(client, TOPIC, queue_id) == self.messages[queue_id], queue_id
                fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue_id}
                offset = _done(client.ask(RequestCode.QUERY_CONSUMER_OFFSET, fields)).fields["offset"]
                assert int(offset) == 3 * (self.stages - 1) + 1, (queue_id, offset, self.stages)
            for topic, wanted in ((LATER, self.later), (PAID, self.paid)):
                _wait_for(client, topic, 0, wanted)
                assert sorted(bodies(client, topic, 0)) == sorted(wanted), topic
            for stage in range(self.stages):
                fields = {"topic": TOPIC, "key": f"key-{stage}-5", "maxNum": 32, "beginTimestamp": 0}
                answer = client.ask(RequestCode.QUERY_MESSAGE, fields | {"endTimestamp": 1 << 62})
                assert [decode_record(one.record).body for one in split_records(answer.body)] == [b"%d-5" % stage]
            topics = _table(client.ask(RequestCode.GET_ALL_TOPIC_CONFIG), "topicConfigTable")
            assert (topics[TOPIC]["readQueueNums"], topics[TOPIC]["topicSysFlag"]) == (QUEUES, 1)
            groups = _table(client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), "subscriptionGroupTable")
            assert groups[GROUP]["retryMaxTimes"] == RETRIES


def _wait_for(client: RemotingSocket, topic: str, queue_id: int, wanted: Sequence[bytes]) -> None:
    """Until as many messages can be pulled: an acknowledged one is in its queue soon, a delayed one later."""

    def has_all() -> bool:
        return len(bodies(client, topic, queue_id)) >= len(wanted)

    wait_until(has_all, f"queue {queue_id} of {topic} has {len(wanted)} messages", TIMEOUT_S, poll_s=0.2)


def bodies(client: RemotingSocket, topic: str, queue_id: int) -> list[bytes]:
    """Of all messages of a queue, which begins at 0, in order."""
    found: list[bytes] = []
    while True:
        fields = pull_fields(GROUP, topic, len(found), queueId=queue_id, sysFlag=_SUBSCRIPTION, subscription="*")
        answer = client.ask(RequestCode.PULL_MESSAGE, fields)
        if answer.code != 0:
            return found
        messages = [decode_record(one.record) for one in split_records(answer.body)]
        assert [one.queue_offset for one in messages] == list(range(len(found), len(found) + len(messages)))
        found += [one.body for one in messages]


def _table(answer: Frame, name: str) -> Mapping[str, Mapping[str, object]]:
    content = loads(_done(answer).body)
    assert isinstance(content, dict)
    table = content[name]
    assert isinstance(table, dict)
    return table


def _done(answer: Frame) -> Frame:
    assert answer.code == 0, answer
    return answer
