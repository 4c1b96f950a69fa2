"""Classic replication: how fast a slave catches up, what a SYNC_MASTER takes, and how soon a slave has a message."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from benchmarks import stats
from benchmarks.blocking_remoting import BlockingRemotingClient
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.peers import java, rocketmq
from benchmarks.peers.rocketmq import JavaLoad
from benchmarks.processes import ChildError, PythonChild
from benchmarks.registry import Scenario, load
from benchmarks.sending import send_count, send_rate
from benchmarks.targets import JAVA_PAIR, PUT_ALONE, RAW_COPY
from dledger.monitoring import ConditionKind
from dledger.remoting.frame import Frame
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import HOST, free_ports
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.message.message import Message
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.remoting.codes import RequestCode

REPLICATION: Final = "ha_replication"
SYNC: Final = "sync_master_send"
LAG: Final = "ha_idle_lag"
TOPIC: Final = "bench"
QUEUES: Final = 8
BODY: Final = os.urandom(1024)
MESSAGE: Final = Message(TOPIC, BODY)
REPLICATED: Final = 512 * 1024
"""Messages, of 1 KiB each."""
JAVA_WINDOW: Final = 1000
PUTS_MAX: Final = 1000
IDLE_S: Final = 0.01
"""Between an answered put and the next one, so that master and slave have nothing to do."""
POLL_S: Final = 0.02
WAIT_S: Final = 120.0
_SUSPENDED: Final = 0b110
"""Of a pull: it waits for messages, and says what it subscribes to."""
_FOUND: Final = 0


@contextmanager
def pair(directory: Path, master: Mapping[str, str]) -> Iterator[tuple[LocalBrokers, LocalBrokers]]:
    """A master with these settings, and a slave that is not started yet."""
    (port,) = free_ports(1)
    with ExitStack() as stack:
        directory.mkdir()
        (directory / "master").mkdir()
        settings = {"haListenPort": str(port), **master}
        first = LocalBrokers(directory / "master", size=1, plain=True, flush="async", settings=settings)
        settings = {"brokerRole": "SLAVE", "brokerId": "1", "haMasterAddress": f"{HOST}:{port}"}
        second = LocalBrokers(directory / "slave", size=1, plain=True, flush="async", settings=settings)
        yield stack.enter_context(first), second


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Each with a pair of its own."""
    if REPLICATION in names:
        yield _replication(context)
    if LAG in names:
        yield _lag(context)
    if SYNC in names:
        yield _sync(context)


# -- catching up -------------------------------------------------------------------------------------------------------


def _replication(context: Context) -> Figure:
    rounds: list[tuple[float, float]] = []
    with pair(context.directory / "pair", {}) as (master, slave):
        with Admin(master.addresses) as admin, Producer(master.addresses, timeout_s=30) as producer:
            admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
            send_count(producer, MESSAGE, context.settings.sized(REPLICATED))
        for _ in range(context.settings.rounds):
            raw = _raw_copy(context, master)
            with slave:
                ours = _catch_up(context, master, slave)
            for node in slave.nodes:
                shutil.rmtree(slave.root_dir(node))
            rounds.append((ours, raw))
            context.say(f"  {ours:,.0f} MB/s replicated, {raw:,.0f} MB/s copied: {ours / raw:.2f}")
    return Figure.median(REPLICATION, [one for one, _ in rounds], "MB/s", RAW_COPY, [raw for _, raw in rounds])


def _catch_up(context: Context, master: LocalBrokers, slave: LocalBrokers) -> float:
    """MB/s from the first bytes that the slave is seen to have to the last ones."""
    (name,) = master.nodes
    with Admin(master.addresses) as at_master, Admin(slave.addresses) as at_slave:
        end = _end(at_master, master.nodes[name].client_address)
        address = slave.nodes[name].client_address
        began = first = have = 0.0
        give_up = time.monotonic() + WAIT_S
        while have < end:
            if time.monotonic() > give_up:
                raise ChildError(f"the slave has {have:,.0f} of {end:,} bytes after {WAIT_S:g} s")
            time.sleep(POLL_S)
            have = _end(at_slave, address)
            if have and not began:
                began, first = time.perf_counter(), have
        took = time.perf_counter() - began
        while at_slave.status(address).table["dispatchBehindBytes"] != "0":
            time.sleep(POLL_S)
        context.say(f"    its queues are complete {time.perf_counter() - began - took:.2f} s later")
    return (end - first) / took / 1e6


def _end(admin: Admin, address: str) -> int:
    """The end of a broker's log."""
    end = admin.status(address).runtime.end
    if end is None:
        raise ChildError(f"{address} does not tell the end of its log")
    return end


def _raw_copy(context: Context, master: LocalBrokers) -> float:
    """MB/s of the bytes of the master's log, read by one process and written by another."""
    (name,) = master.nodes
    with Admin(master.addresses) as admin:
        end = _end(admin, master.nodes[name].client_address)
    files = [str(one) for one in sorted((master.root_dir(name) / "commitlog").iterdir())]
    target, module = context.directory / "raw-copy", "benchmarks.children.raw_copy"
    with PythonChild(module, ["send", str(end), *files], context.directory / "raw-send.log") as sender:
        port = sender.hear(WAIT_S)["port"]
        with PythonChild(
            module, ["receive", str(port), str(target)], context.directory / "raw-receive.log"
        ) as receiver:
            answer = receiver.hear(WAIT_S)
    target.unlink()
    if answer["bytes"] != end:
        raise ChildError(f"{answer['bytes']} of {end} bytes were copied")
    return float(answer["bytes"] / answer["seconds"] / 1e6)


# -- two copies --------------------------------------------------------------------------------------------------------


def _sync(context: Context) -> Figure:
    """Ours by our own pipelined producer, Java's pair by Java's asynchronous one."""
    settings = context.settings
    master_settings = {"brokerRole": "SYNC_MASTER", "minInSyncReplicas": "2"}
    with pair(context.directory / "sync", master_settings) as (master, slave), slave:
        _wait_for_slave(master)
        with Admin(master.addresses) as admin, Producer(master.addresses, timeout_s=30) as producer:
            admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
            send_rate(producer, MESSAGE, settings.warmup_seconds)
            rates = [send_rate(producer, MESSAGE, settings.seconds) for _ in range(settings.rounds)]
    context.say(f"  {', '.join(f'{one:,.0f}' for one in rates)} messages/s")
    ours = stats.median(rates)
    if not context.has(java):
        return Figure(SYNC, ours, "messages/s", context.without("RocketMQ", java), None)
    theirs = _java_pair(context)
    return Figure(SYNC, ours, "messages/s", JAVA_PAIR, theirs)


def _wait_for_slave(master: LocalBrokers) -> None:
    (name,) = master.nodes
    address = master.nodes[name].client_address
    deadline = time.monotonic() + WAIT_S
    with Admin(master.addresses) as admin:
        while ConditionKind.NOT_REPLICATING in admin.status(address).runtime.conditions:
            if time.monotonic() > deadline:
                raise ChildError(f"no slave follows the master after {WAIT_S:g} s")
            time.sleep(POLL_S)


def _java_pair(context: Context) -> float:
    settings = context.settings
    java.build(*rocketmq.MODULES)
    with ExitStack() as stack:
        server = NameServer(NameServerConfig(listen_port=0, kv_config_path=context.directory / "kvConfig.json")).start()
        stack.callback(server.stop)
        stack.enter_context(rocketmq.java_pair(context.directory / "theirs", server.address))
        load = stack.enter_context(JavaLoad(context.directory / "client-of-theirs", server.address))

        def one_round(seconds: float) -> tuple[float, int]:
            answer = load.measure("async", TOPIC, width=JAVA_WINDOW, seconds=seconds, bodyBytes=len(BODY))
            return float(answer["perSecond"]), int(answer["failed"])

        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if not one_round(1.0)[1]:
                    break
            except ChildError:  # nothing succeeded: the slave does not follow yet
                pass
            if time.monotonic() > deadline:
                raise ChildError(f"Java's slave does not follow its master after {WAIT_S:g} s")
        one_round(settings.warmup_seconds)
        rounds = [one_round(settings.seconds) for _ in range(settings.rounds)]
    failed = sum(count for _, count in rounds)
    context.say(f"  Java's pair: {', '.join(f'{rate:,.0f}' for rate, _ in rounds)} messages/s, {failed} failed")
    return stats.median([rate for rate, _ in rounds])


# -- how soon ----------------------------------------------------------------------------------------------------------


def _lag(context: Context) -> Figure:
    settings = context.settings
    with pair(context.directory / "idle", {}) as (master, slave), slave, ExitStack() as stack:
        (name,) = master.nodes
        with Admin(master.addresses) as admin:
            admin.put_topic(TopicInfo(TOPIC, 1, 1))
        at_master, at_slave = (stack.enter_context(closing(BlockingRemotingClient())) for _ in range(2))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        send = _sender(at_master, master.nodes[name].client_address)
        pull = _puller(at_slave, slave.nodes[name].client_address)
        offset = 0

        def some(seconds: float) -> list[tuple[float, float]]:
            nonlocal offset
            found: list[tuple[float, float]] = []
            deadline = time.perf_counter() + seconds
            while time.perf_counter() < deadline and len(found) < PUTS_MAX:
                pulled = pool.submit(pull, offset)
                time.sleep(IDLE_S)
                began = time.perf_counter()
                send()
                stored = time.perf_counter()
                found.append((pulled.result() - began, stored - began))
                offset += 1
            return found

        some(settings.warmup_seconds)
        both = [one for _ in range(settings.rounds) for one in some(settings.seconds)]
    lags, puts = ([one * 1000 for one in column] for column in zip(*both, strict=True))
    p99, put = stats.percentile(lags, 99), stats.percentile(puts, 99)
    context.say(f"  {len(lags)} puts: p50 {stats.median(lags):.2f} ms, longest {max(lags):.1f} ms")
    return Figure(LAG, p99, "ms", PUT_ALONE, put)


def _sender(frames: BlockingRemotingClient, address: str) -> Callable[[], None]:
    fields = {
        "a": "bench",
        "b": TOPIC,
        "c": "TBW102",
        "d": "4",
        "e": "0",
        "f": "0",
        "g": "1700000000000",
        "h": "0",
        "i": "",
        "j": "0",
        "k": "false",
        "m": "false",
    }
    request = Frame(RequestCode.SEND_MESSAGE_V2, 0, fields, BODY)

    def send() -> None:
        answer = frames.call(address, request, WAIT_S)
        if answer.code:
            raise ChildError(f"a message was refused with code {answer.code}: {answer.remark}")

    return send


def _puller(frames: BlockingRemotingClient, address: str) -> Callable[[int], float]:
    """Waits for the message at an offset; returns when it came."""
    fields = {
        "consumerGroup": "bench",
        "topic": TOPIC,
        "queueId": "0",
        "maxMsgNums": "1",
        "sysFlag": str(_SUSPENDED),
        "commitOffset": "0",
        "suspendTimeoutMillis": "15000",
        "subscription": "*",
        "subVersion": "0",
        "expressionType": "TAG",
    }

    def pull(offset: int) -> float:
        request = Frame(RequestCode.PULL_MESSAGE, 0, fields | {"queueOffset": str(offset)})
        deadline = time.perf_counter() + WAIT_S
        while time.perf_counter() < deadline:
            answer = frames.call(address, request, WAIT_S)
            if answer.code == _FOUND:
                return time.perf_counter()
            time.sleep(POLL_S)  # at the begin the slave does not know the topic yet
        raise ChildError(f"the slave has no message {offset} after {WAIT_S:g} s: code {answer.code}, {answer.remark}")

    return pull


SCENARIO: Final = Scenario("a plain master and its slave", (REPLICATION, LAG, SYNC), measure, load(2, 0.1))
