"""Three groups in each of three processes, each process leading one: of the log, and of brokers.

Beside one group on as many processes; and what two groups notice when the process that leads the third one is killed,
or the disk of that one's leader is full.
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import stats
from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.processes import PythonChild
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.appends import BODY_BYTES, WINDOWS
from benchmarks.scenarios.brokers import TOPIC, prepare
from benchmarks.targets import BEFORE, ONE_GROUP
from dledger.types import NodeId
from dledger_cli.local.brokers import SeveralBrokers
from dledger_cli.local.group import SeveralGroups

APPENDS: Final = "groups_append"
SENDS: Final = "groups_send"
KILL: Final = "groups_kill_p99"
FULL_DISK: Final = "groups_full_disk_p99"
GROUPS: Final = ("a", "b", "c")
VICTIM: Final = NodeId("n0")
"""The node that is killed, or whose disk is full; it leads the first group."""
LEADERS: Final = {"a": VICTIM, "b": NodeId("n1"), "c": NodeId("n2")}
SEGMENTS: Final = {"segment_bytes": "256m", "index_segment_bytes": "40m"}
BROKER_FILES: Final = {
    "mappedFileSizeCommitLog": "64m",
    "mappedFileSizeConsumeQueue": "60000",
    "maxHashSlotNum": "5000",
    "maxIndexNum": "20000",
}
DISK_MIB: Final = 1024
INTERVAL_S: Final = 0.005
"""Between two messages of a producer: few enough that the processors wait for the disk, not the messages for them."""
TIMEOUT_S: Final = 60.0


class _Sends(NamedTuple):
    """Latencies of one group's messages in milliseconds, one after the other, and how many failed."""

    took: Sequence[float]
    failed: int


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Full pipelines to all three, and to one alone, by turns; the processors are shared by all."""
    del names  # there is one
    three: list[float] = []
    one: list[float] = []
    with ExitStack() as stack:
        spread = stack.enter_context(SeveralGroups(context.directory / "three", GROUPS, settings=SEGMENTS))
        alone = stack.enter_context(SeveralGroups(context.directory / "one", GROUPS[:1], settings=SEGMENTS))
        for group, node in LEADERS.items():
            spread.lead(group, node)
        alone.leader_of(GROUPS[0])
        clients = [
            stack.enter_context(LoadClient(spread.addresses, group, context.directory / f"client-{group}.log"))
            for group in GROUPS
        ]
        single = stack.enter_context(LoadClient(alone.addresses, GROUPS[0], context.directory / "client-one.log"))
        for _ in range(context.settings.rounds):
            three.append(sum(_rates(context, clients)))
            one.append(sum(_rates(context, [single])))
    yield Figure.median(APPENDS, three, "entries/s", ONE_GROUP, one)


def _rates(context: Context, clients: Sequence[LoadClient]) -> list[float]:
    """What each acknowledges per second, all at the same time."""
    settings, (window, _) = context.settings, WINDOWS["append_pipelined"]
    with ThreadPoolExecutor(len(clients)) as threads:
        running = [
            threads.submit(client.appends_per_second, settings.seconds, settings.warmup_seconds, BODY_BYTES, window)
            for client in clients
        ]
        return [one.result() for one in running]


def measure_sends(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """One pipelined producer for each of three groups of brokers, and one for one alone, by turns."""
    del names  # there is one
    three: list[float] = []
    one: list[float] = []
    files = {**BROKER_FILES, "mappedFileSizeCommitLog": "256m"}
    with ExitStack() as stack:
        spread = stack.enter_context(SeveralBrokers(context.directory / "three", GROUPS, settings=files))
        alone = stack.enter_context(SeveralBrokers(context.directory / "one", GROUPS[:1], settings=files))
        senders = _senders(context, spread, stack)
        (single,) = _senders(context, alone, stack)
        spread.lead(LEADERS, TIMEOUT_S)
        for _ in range(context.settings.rounds):
            three.append(_send_rate(context, senders))
            one.append(_send_rate(context, [single]))
    yield Figure.median(SENDS, three, "messages/s", ONE_GROUP, one)


def _send_rate(context: Context, senders: Sequence[PythonChild]) -> float:
    """Messages per second that are acknowledged to all of them together."""
    settings = context.settings
    command = {"do": "rate", "seconds": settings.seconds, "warmup_seconds": settings.warmup_seconds}
    answers = _ask_all(senders, command, settings.seconds + settings.warmup_seconds)
    return sum(float(one["per_second"]) for one in answers)


def measure_failures(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Messages one after the other to each of three groups, before and after one of them is harmed, repeatedly."""
    with ExitStack() as stack:
        settings = {**BROKER_FILES, "cleanResourceInterval": "500"}
        brokers = SeveralBrokers(context.directory / "apart", GROUPS, settings=settings)
        disk = brokers.root_dir_of(VICTIM, GROUPS[0])
        if FULL_DISK in names:
            stack.enter_context(_small_disk(disk))
        stack.enter_context(brokers)
        senders = _senders(context, brokers, stack)
        if KILL in names:
            harm, undo = (lambda: brokers.kill(VICTIM)), (lambda: brokers.start(VICTIM))
            yield _p99_of_others(context, KILL, brokers, senders, harm, undo)
        if FULL_DISK in names:
            rest = disk / "rest"
            yield _p99_of_others(context, FULL_DISK, brokers, senders, lambda: _fill(rest), rest.unlink)


def _p99_of_others(
    context: Context,
    name: str,
    brokers: SeveralBrokers,
    senders: Sequence[PythonChild],
    harm: Callable[[], None],
    undo: Callable[[], None],
) -> Figure:
    before: list[float] = []
    after: list[float] = []
    brokers.lead(LEADERS, TIMEOUT_S)
    _singly(senders, context.settings.warmup_seconds)
    for _ in range(context.settings.rounds):
        usual = _singly(senders, context.settings.seconds)
        harmed = _singly(senders, context.settings.seconds, harm)
        successor = brokers.master_of(GROUPS[0], other_than=VICTIM)
        undo()
        brokers.lead(LEADERS, TIMEOUT_S)
        before.append(_p99(usual[1:]))
        after.append(_p99(harmed[1:]))
        context.say(
            f"  others' p99 {before[-1]:.2f} ms before, {after[-1]:.2f} ms after; of the harmed group, led by "
            f"{successor} then, at most {max(harmed[0].took):,.0f} ms, {harmed[0].failed} of unknown outcome"
        )
        if any(one.failed for one in harmed[1:]):
            raise RuntimeError("messages to a group that was not harmed failed")
    return Figure.median(name, after, "ms", BEFORE, before)


def _singly(senders: Sequence[PythonChild], seconds: float, harm: Callable[[], None] = lambda: None) -> list[_Sends]:
    """What each group's producer finds while something is done, in the order of the groups."""
    command = {"do": "singly", "seconds": seconds, "interval_s": INTERVAL_S}
    return [_Sends(**one) for one in _ask_all(senders, command, seconds, harm)]


def _p99(sends: Sequence[_Sends]) -> float:
    return stats.percentile([took for one in sends for took in one.took], 99)


def _senders(context: Context, brokers: SeveralBrokers, stack: ExitStack) -> list[PythonChild]:
    """A producer for each group, in a process of its own; the topic is there."""
    senders = []
    for group in brokers.groups:
        brokers.master_of(group)
        with brokers.admin_of(group, TIMEOUT_S) as admin:
            prepare(admin)
        log = context.directory / f"sender-{brokers.directory.name}-{group}.log"
        words = [TOPIC, *brokers.addresses_of(group)]
        senders.append(stack.enter_context(PythonChild("benchmarks.children.send_client", words, log)))
    return senders


def _ask_all(
    senders: Sequence[PythonChild],
    command: Mapping[str, object],
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:  # Any: the values of JSON objects
    for one in senders:
        one.tell(command)
    meanwhile()
    return [one.hear(seconds + TIMEOUT_S) for one in senders]


@contextmanager
def _small_disk(directory: Path) -> Iterator[None]:
    """A tmpfs on ``directory``. Raises ``OSError`` where file systems cannot be mounted."""
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "dledger-bench", str(directory)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        raise PermissionError(f"{FULL_DISK} mounts a small disk, as root: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _fill(file: Path) -> None:
    """Write until the disk is full."""
    try:
        with file.open("wb", buffering=0) as rest:
            while rest.write(bytes(1 << 20)):
                pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


LOGS: Final = Scenario("three groups on three processes", (APPENDS,), measure, load(4))
BROKERS: Final = Scenario("brokers of three groups on three processes", (SENDS,), measure_sends, load(6))
FAILURES: Final = Scenario(
    "one of three groups is harmed: a killed process, a full disk", (KILL, FULL_DISK), measure_failures
)
