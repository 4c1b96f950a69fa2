"""A plain master and its slaves as real processes, and a load that records what the master said of each message."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dledger.errors import DLedgerError
from dledger.monitoring import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger.types import NodeId
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import HOST
from dledger_cli.local.tcp_proxy import LocalProxiedGroup
from rocketstore.client import Message, Producer, SendResult, SendStatus
from rocketstore.client.aio.received import split_records
from tests.integration.broker_harness import QUEUES, SMALL_FILES, BrokerGroup
from tests.integration.harness import N0
from tests.support.broker_history import BrokerHistory, SendOp
from tests.support.broker_load import IN_FLIGHT_MAX, TOPIC
from tests.support.history import Outcome
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until

JOIN_TIMEOUT_S: Final = 60.0
CATCH_UP_S: Final = 60.0


class ClassicBrokers(LocalProxiedGroup, BrokerGroup):
    """Brokers of one name: ``master`` is the first one, until another is promoted.

    A slave reaches the first broker's port for slaves through ``network``, if there is one.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 2,
        role: str = "SYNC_MASTER",
        flush: str = "async",
        network: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        LocalBrokers.__init__(
            self,
            directory,
            size=size,
            name="broker-a",
            flush=flush,
            settings={
                **SMALL_FILES,
                "haSendHeartbeatInterval": "200",
                "haHousekeepingInterval": "2000",
                "slaveTimeout": "1500",
                **(settings or {}),
            },
        )
        self.plain = True
        self.role = role
        self.head = N0
        """The master."""
        self.own: dict[NodeId, dict[str, str]] = {}
        """Settings of single brokers."""
        self.history = BrokerHistory()
        self.allowed_to_fail: set[NodeId] = set()
        self._has_proxies = network

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        """As of a plain broker; and who is the master."""
        lines = super().conf_lines(node) | {"haListenPort": str(self.nodes[node].peer_port)}
        if node == self.head:
            roles = {"brokerRole": self.role, "brokerId": "0"}
        else:
            port = self.network.port(node, self.head) if self._has_proxies else self.nodes[self.head].peer_port
            number = str(int(node[1:]) + 1)
            roles = {"brokerRole": "SLAVE", "brokerId": number, "haMasterAddress": f"{HOST}:{port}"}
        return lines | roles | self.own.get(node, {})

    @property
    def slaves(self) -> list[NodeId]:
        """All others."""
        return [node for node in self.nodes if node != self.head]

    def start_pair(self) -> None:
        """Start all, and wait until all slaves follow."""
        self.start_all()
        self.wait_followed()

    def wait_followed(self, *, by: list[NodeId] | None = None) -> None:
        """Wait until these slaves (all) have what the master had when this began, and can show it."""
        end = self.end_of(self.head)
        for node in self.slaves if by is None else by:
            wait_until(lambda node=node: self.end_of(node) >= end, f"{node} has what the master had", CATCH_UP_S)  # type: ignore[misc]
        self.wait_no_condition(self.head)

    def wait_no_condition(self, node: NodeId) -> None:
        """Wait until it says that its log is replicated."""
        wait_until(
            lambda: (
                (status := self.broker_statuses().get(node)) is not None
                and ConditionKind.NOT_REPLICATING not in status.runtime.conditions
            ),
            f"{node} says that all is well",
            CATCH_UP_S,
        )

    def wait_condition(self, node: NodeId, words: str) -> None:
        """Wait until it says that its log is not replicated, and why."""
        wait_until(lambda: words in self.problem_of(node), f"{node} says {words!r}", CATCH_UP_S)

    def problem_of(self, node: NodeId) -> str:
        """What it says of replication; empty if nothing."""
        status = self.broker_statuses().get(node)
        problems = () if status is None else status.runtime.problems
        return " ".join(one.message for one in problems if one.kind == ConditionKind.NOT_REPLICATING)

    def end_of(self, node: NodeId) -> int:
        """The end of its log; -1 if it does not answer."""
        status = self.broker_statuses().get(node)
        return -1 if status is None or status.runtime.end is None else status.runtime.end

    def promote(self, node: NodeId) -> None:
        """Make this slave the master, by a restart; the old one must not run."""
        assert not self.is_running(self.head)
        if self.is_running(node):
            assert self.stop(node) == 0
        self.head = node
        self.start(node)

    def wipe(self, node: NodeId) -> None:
        """Remove its directory."""
        shutil.rmtree(self.root_dir(node))

    def bodies_at(self, node: NodeId) -> dict[int, list[bytes]]:
        """What this broker shows of each queue, without gap or repetition, once all of its log is in its queues."""
        wait_until(
            lambda: (
                (status := self.broker_statuses().get(node)) is not None
                and status.runtime.dispatch_behind == 0
                and TOPIC in self.topics_of(node)
            ),
            f"{node} has dispatched",
            CATCH_UP_S,
        )
        stored = {queue: b"".join(self.pull_all(node, TOPIC, queue)) for queue in range(QUEUES)}
        return {queue: [one.body for one in split_records(records)] for queue, records in stored.items()}

    def check(self, node: NodeId) -> None:
        """What this broker shows explains all that producers were told."""
        complaints = self.history.complaints(self.bodies_at(node))
        assert not complaints, f"{node}:\n" + "\n".join(complaints)

    def same_logs(self) -> None:
        """All have stopped: their logs are equal, byte for byte."""
        logs = {node: _log_of(self.root_dir(node) / "commitlog") for node in self.nodes}
        first = next(iter(logs.values()))
        assert all(one == first for one in logs.values()), {node: sorted(one) for node, one in logs.items()}


def _log_of(directory: Path) -> dict[str, bytes]:
    """The log's files that are not blank."""
    found = {one.name: one.read_bytes() for one in directory.iterdir() if one.name.isdigit()}
    return {name: content for name, content in found.items() if content.strip(b"\0")}


class ClassicLoad:
    """Producers at one master, from entry to exit: one by one, pipelined, and over remoting. Only PUT_OK counts."""

    _eras = itertools.count()

    def __init__(self, brokers: ClassicBrokers, *, pace_s: float = 0.003) -> None:
        self.history = brokers.history
        self.statuses: set[str] = set()
        """All that were answered."""
        self._node = brokers.nodes[brokers.head]
        self._pace_s = pace_s
        self._era = next(self._eras)
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        roles: dict[str, Callable[[str], None]] = {
            "single": self._send_singly,
            "pipeline": self._send_pipelined,
            "remoting-0": self._send_remoting,
            "remoting-1": self._send_remoting,
        }
        self._threads = [self._thread(f"{name}-{self._era}", role) for name, role in roles.items()]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        if kind is None:
            if self._failures:
                raise self._failures[0]
            assert not any(thread.is_alive() for thread in self._threads), "a producer hangs"

    def _thread(self, who: str, role: Callable[[str], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                role(who)
            except BaseException as error:  # noqa: BLE001 - told when the load ends
                self._failures.append(error)

        return threading.Thread(target=guarded, name=who, daemon=True)

    def _bodies(self, who: str) -> Iterator[tuple[int, bytes]]:
        for number in itertools.count():
            if self._stopping.wait(self._pace_s):
                return
            yield number, f"{who}/{number} ".encode() + b"." * (number % 700)

    def _answered(self, body: bytes, began: float, result: SendResult, stream: str = "", number: int = -1) -> None:
        self.statuses.add(str(result.status))
        if result.status is SendStatus.SEND_OK:
            place = (result.queue, result.offset)
            self.history.record(
                SendOp(body, began, time.monotonic(), Outcome.ACKED, *place, stream=stream, number=number)
            )
        else:  # it is stored at the master, and perhaps nowhere else
            self._failed(body, began, Outcome.UNKNOWN, str(result.status), stream, number)

    def _failed(
        self, body: bytes, began: float, outcome: Outcome, why: str, stream: str = "", number: int = -1
    ) -> None:
        self.history.record(SendOp(body, began, time.monotonic(), outcome, stream=stream, number=number, error=why))

    def _producer(self) -> Producer:
        return Producer([self._node.client_address], timeout_s=5, enable_idempotence=False)

    def _send_singly(self, who: str) -> None:
        with self._producer() as producer:
            for number, body in self._bodies(who):
                began = time.monotonic()
                try:
                    result = producer.send(Message(TOPIC, body, keys=f"n{number}"))
                except DLedgerError as error:
                    self._failed(body, began, Outcome(error.outcome), str(error))
                else:
                    self._answered(body, began, result)

    def _send_pipelined(self, who: str) -> None:
        in_flight: deque[tuple[int, bytes, float, Future[SendResult]]] = deque()

        def finish_one() -> None:
            number, body, began, future = in_flight.popleft()
            try:
                result = future.result()
            except DLedgerError as error:
                self._failed(body, began, Outcome(error.outcome), str(error), who, number)
            else:
                self._answered(body, began, result, who, number)

        with self._producer() as producer:
            for number, body in self._bodies(who):
                began = time.monotonic()
                try:
                    in_flight.append((number, body, began, producer.submit(Message(TOPIC, body), key=f"k{number % 7}")))
                except DLedgerError as error:
                    self._failed(body, began, Outcome(error.outcome), str(error), who, number)
                while in_flight and (in_flight[0][3].done() or len(in_flight) > IN_FLIGHT_MAX):
                    finish_one()
            while in_flight:
                finish_one()

    def _send_remoting(self, who: str) -> None:
        """Several in flight; what is not answered is unknown, and is not sent again."""
        numbers, client = self._bodies(who), None
        while not self._stopping.is_set():
            pending: dict[int, tuple[bytes, float]] = {}
            try:
                client = client or RemotingSocket(self._node.client_port)
                client.socket.settimeout(10)
                for number, body in itertools.islice(numbers, 5):
                    began = time.monotonic()
                    pending[client.begin_send(TOPIC, body, number % QUEUES)] = (body, began)
                for opaque in list(pending):
                    answer = client.answer_to(opaque)
                    body, began = pending.pop(opaque)
                    self._settled(body, began, answer.code, answer.remark, answer.fields)
            except (OSError, EOFError) as error:
                for body, began in pending.values():
                    self._failed(body, began, Outcome.UNKNOWN, repr(error))
                if client is not None:
                    client.socket.close()
                client = None
                self._stopping.wait(0.05)
        if client is not None:
            client.socket.close()

    def _settled(self, body: bytes, began: float, code: int, remark: str, fields: Mapping[str, str]) -> None:
        self.statuses.add(AnswerCode(code).name)
        if code == AnswerCode.SUCCESS:
            place = (int(fields["queueId"]), int(fields["queueOffset"]))
            self.history.record(SendOp(body, began, time.monotonic(), Outcome.ACKED, *place))
        else:
            self._failed(body, began, Outcome.UNKNOWN, f"{AnswerCode(code).name}: {remark}")
