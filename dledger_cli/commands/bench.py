"""``dledger bench``: measures the throughput and latency of a running group.

The load comes from clients with one thread each that keep a number of records in flight, or send at a fixed rate. It is
measured in constant memory, and reported in lines for people, or as one JSON object for programs.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import click

from dledger.command_line import flag_values
from dledger.errors import AccessDeniedError, DLedgerError, InvalidRequestError, Outcome
from dledger_cli import terminal
from dledger_cli.metrics.recorder import Histogram
from dledger_cli.targets import BrokerTarget, GroupTarget, broker_options, group_options
from dledger_cli.terminal import EXIT_FAILED, EXIT_UNKNOWN_OUTCOME, ErrorReportingGroup
from rocketstore.client.aio.errors import ForbiddenError, MessageRefusedError, NotFoundError

SIZE_MAX: Final = 4 << 20
"""The default limit of nodes and brokers."""
IN_FLIGHT: Final = 1000
IN_FLIGHT_BYTES: Final = 8 << 20
IN_FLIGHT_BYTES_MAX: Final = 1 << 30
"""For all clients together: everything in flight is in memory."""
SECONDS: Final = 10.0
_TICK_S: Final = 1.0
_OVERHEAD_BYTES: Final = 1024
"""An upper bound for what a record costs its client besides its body."""


@click.group(
    cls=ErrorReportingGroup,
    short_help="Measure a running group or its brokers.",
    epilog="""\b
Examples:
  dledger bench append -b 10.0.0.1:30911,10.0.0.2:30911
  dledger bench send -b 10.0.0.1:10911,10.0.0.2:10911 --topic bench --rate 1000""",
)
def bench() -> None:
    """Measure the throughput and latency of a running group or its brokers.

    The written data remain: use a group or topic that nobody else reads.
    """


@dataclass(frozen=True, slots=True)
class _Wanted:
    size: int
    as_json: bool
    plan: LoadPlan


def _load_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options common to both loads, passed to the command as one ``wanted``."""

    @functools.wraps(command)
    def with_wanted(
        size: int,
        records: int | None,
        seconds: float | None,
        rate: float | None,
        in_flight: int | None,
        clients: int,
        as_json: bool,
        **others: object,
    ) -> None:

        if records is not None and seconds is not None:
            raise click.UsageError("give --records or --seconds, not both")
        if in_flight is None:
            in_flight = min(IN_FLIGHT, IN_FLIGHT_BYTES // size)
        held = (size + _OVERHEAD_BYTES) * in_flight * clients
        if held > IN_FLIGHT_BYTES_MAX:
            raise click.UsageError(
                f"--size {size} with --in-flight {in_flight} and --clients {clients} holds {held:,} bytes in memory: "
                f"at most {IN_FLIGHT_BYTES_MAX:,} are allowed"
            )
        if records is not None and records < clients:
            raise click.UsageError(f"--records {records} is less than --clients {clients}: each client sends some")
        if records is None and seconds is None:
            seconds = SECONDS
        command(wanted=_Wanted(size, as_json, LoadPlan(records, seconds, rate, in_flight, clients)), **others)

    options = (
        click.option(
            "--size",
            type=flag_values.Whole(1, SIZE_MAX),
            default=256,
            show_default=True,
            metavar="BYTES",
            help="Size of a record's body (random bytes).",
        ),
        click.option("--records", type=flag_values.Whole(min=1), metavar="N", help="Stop after this many records."),
        click.option(
            "--seconds",
            type=flag_values.Seconds(min=0, min_open=True),
            metavar="SECONDS",
            help=f"Stop after this time. Default: {SECONDS:g}, unless --records is given.",
        ),
        click.option(
            "--rate",
            type=flag_values.Number(min=0, min_open=True),
            metavar="N",
            help="Records per second of all clients together. Default: full speed.",
        ),
        click.option(
            "--in-flight",
            type=flag_values.Whole(1, 100_000),
            metavar="N",
            help="Records of each client that may be unanswered at once; 1 shows the latency of a single record. "
            f"Default: {IN_FLIGHT}, and no more than {IN_FLIGHT_BYTES >> 20} MiB.",
        ),
        click.option(
            "--clients",
            type=flag_values.Whole(1, 256),
            default=1,
            show_default=True,
            metavar="N",
            help="Number of clients, each with its own connection.",
        ),
        click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object."),
    )
    wrapped: Callable[..., None] = with_wanted
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


_EPILOG: Final = """
A latency is the time from sending a record to its acknowledgement. With --rate it counts from when the record was due,
so that a stalling group cannot hide the delay of later records. On a terminal there is a line every
second. Ctrl-C ends the load and prints the results so far, with exit code 130.

Exit codes: 1 if a record was not stored, 3 if some have an unknown outcome."""


@bench.command(
    short_help="Append entries to a group's log.",
    epilog="""\b
Examples:
  dledger bench append -b 10.0.0.1:30911,10.0.0.2:30911         ten seconds at full speed
  dledger bench append --records 100000 --size 1024 --clients 4
  dledger bench append --rate 500 --seconds 60 --json           latencies at a moderate load
"""
    + _EPILOG,
)
@_load_options
@group_options
def append(wanted: _Wanted, target: GroupTarget) -> None:
    """Append entries and report rate, latencies and errors."""
    body = os.urandom(wanted.size)

    @contextmanager
    def open_client() -> Iterator[Submit]:
        with closing(target.client()) as client:
            yield partial(client.submit, body)

    with closing(target.client()) as client:
        client.metadata()  # fails once with the usual error if nobody answers, instead of once per record
    _measure(wanted, open_client, {"group": target.group})


@bench.command(
    short_help="Send messages to a topic.",
    epilog="""\b
Examples:
  dledger bench send -b 10.0.0.1:10911,10.0.0.2:10911 --topic bench
  dledger bench send --topic bench --records 100000 --size 1024 --clients 4
  dledger bench send --topic bench --rate 500 --seconds 60 --json
"""
    + _EPILOG,
)
@click.option("-t", "--topic", required=True, help="The topic.")
@_load_options
@broker_options
def send(topic: str, wanted: _Wanted, target: BrokerTarget) -> None:
    """Send messages and report rate, latencies and errors."""
    from rocketstore.client import Message, PipelineLimits, ProducerOptions

    body = os.urandom(wanted.size)
    in_flight = wanted.plan.in_flight
    room = max(in_flight * (wanted.size + _OVERHEAD_BYTES), PipelineLimits().pending_bytes_max)
    limits = PipelineLimits(pending_bytes_max=room, pending_messages_max=in_flight + 1)

    @contextmanager
    def open_client() -> Iterator[Submit]:
        with target.sending(ProducerOptions(limits=limits)) as producer:
            yield lambda: producer.submit(Message(topic, body))

    with target.brokers() as brokers:
        brokers.admin.topics()  # as for append
    _measure(wanted, open_client, {"topic": topic})


def _measure(wanted: _Wanted, open_client: OpenClient, where: Mapping[str, str]) -> None:

    load = BenchLoad(wanted.plan, open_client)
    with _stopping_by_signal(load) as caught:
        load.start()
        _watch(load, wanted.size)
    what = "append" if "group" in where else "send"
    found = LoadReport(what, where, wanted.plan, wanted.size, load.meter.read(), load.took_s, bool(caught))
    _print(wanted, found)
    if any(one.outcome == "unknown" for one in found.measured.errors):
        raise SystemExit(EXIT_UNKNOWN_OUTCOME)
    if found.measured.errors:
        raise SystemExit(EXIT_FAILED)
    if caught:
        raise SystemExit(128 + caught[0])


def _watch(load: BenchLoad, size: int) -> None:
    """Wait for the end of the load, printing a line every second on a terminal."""

    begun_s = before_s = time.monotonic()
    while not load.wait(_TICK_S):
        if sys.stderr.isatty():
            now_s = time.monotonic()
            recent, failed = load.meter.take_recent(), load.meter.failed
            click.echo(second_line(now_s - begun_s, now_s - before_s, size, recent, failed), err=True)
            before_s = now_s


def _print(wanted: _Wanted, found: LoadReport) -> None:
    if wanted.as_json:
        terminal.print_json(document(found))
    else:
        for line in lines(found):
            click.echo(line)


@contextmanager
def _stopping_by_signal(load: BenchLoad) -> Iterator[list[int]]:
    """Record SIGINT and SIGTERM and stop the load; a second one ends the process."""
    caught: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if caught:
            os._exit(128 + number)
        caught.append(number)
        load.stop()

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


_STEP: Final = 1.02
_FIRST_S: Final = 0.000_01
_LAST_S: Final = 1000.0
BOUNDS_S: Final = tuple(_FIRST_S * _STEP**n for n in range(1 + math.ceil(math.log(_LAST_S / _FIRST_S, _STEP))))
"""Buckets for latencies with a resolution of 2 %, less than the variation between runs."""
PERCENTS: Final = (50.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """How many records failed in the same way; ``first`` is the first one's message."""

    kind: str
    outcome: Outcome
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Totals so far. Latencies are in seconds, of acknowledged records only; None if there are none."""

    acknowledged: int
    average_s: float | None
    percentiles_s: dict[float, float]
    max_s: float | None
    errors: tuple[ErrorCount, ...]

    @property
    def failed(self) -> int:
        """Records not known to be stored."""
        return sum(one.count for one in self.errors)


class Recent(NamedTuple):
    """Records acknowledged since the last query."""

    records: int
    average_s: float
    max_s: float


class Meter:
    """Counts records as they are answered. Thread-safe."""

    def __init__(self) -> None:
        self._latencies = Histogram(BOUNDS_S)
        self._lock = threading.Lock()  # guards the fields below
        self._acknowledged = 0
        self._max_s = 0.0
        self._recent: tuple[int, float, float] = (0, 0.0, 0.0)
        self._errors: dict[tuple[str, Outcome], ErrorCount] = {}

    def acknowledge(self, latency_s: float) -> None:
        """Count a stored record."""
        self._latencies.observe(latency_s)
        with self._lock:
            self._acknowledged += 1
            self._max_s = max(self._max_s, latency_s)
            count, total_s, max_s = self._recent
            self._recent = (count + 1, total_s + latency_s, max(max_s, latency_s))

    def fail(self, error: DLedgerError) -> None:
        """Count a record that is not stored, or may not be."""
        key = (type(error).__name__, error.outcome)
        with self._lock:
            before = self._errors.get(key)
            first = before.first if before else " ".join(str(error).split())
            self._errors[key] = ErrorCount(*key, (before.count if before else 0) + 1, first)

    def take_recent(self) -> Recent:
        """The records acknowledged since the last call."""
        with self._lock:
            (count, total_s, max_s), self._recent = self._recent, (0, 0.0, 0.0)
        return Recent(count, total_s / max(count, 1), max_s)

    @property
    def failed(self) -> int:
        """The number of failures so far."""
        with self._lock:
            return sum(one.count for one in self._errors.values())

    def read(self) -> Measured:
        """The totals so far."""
        buckets, total_s = self._latencies.read()
        with self._lock:
            count, max_s, errors = self._acknowledged, self._max_s, tuple(self._errors.values())
        if not count:
            return Measured(0, None, {}, None, errors)
        found = {percent: min(percentile(buckets, percent), max_s) for percent in PERCENTS}
        return Measured(count, total_s / count, found, max_s, errors)


def percentile(buckets: Sequence[tuple[str, float]], percent: float) -> float:
    """The lowest bound that ``percent`` % of the values do not exceed; ``buckets`` come from ``Histogram.read``."""
    wanted = math.ceil(buckets[-1][1] * percent / 100)
    return next(float(bound) for bound, up_to in buckets if up_to >= wanted)


class SentRecord(Protocol):
    """A record on its way."""

    def exception(self) -> BaseException | None:
        """Why it was not stored, once it is done."""
        ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:  # Any: the record itself
        """Call back with the record once it is done."""
        ...


Submit: TypeAlias = Callable[[], SentRecord]
OpenClient: TypeAlias = Callable[[], AbstractContextManager[Submit]]
"""Opens a client that is closed at the end of the block; the yielded callable sends one record."""
_HOPELESS: Final = (
    AccessDeniedError,
    ForbiddenError,
    InvalidRequestError,
    MessageRefusedError,
    NotFoundError,
)
"""Errors that every further record would get, too."""
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Stops after ``records`` or ``seconds``, whichever is set; ``rate``: records per second of all clients."""

    records: int | None
    seconds: float | None
    rate: float | None
    in_flight: int
    clients: int

    def share(self, client: int) -> int | None:
        """How many records this client sends; None if unlimited."""
        if self.records is None:
            return None
        return self.records // self.clients + (client < self.records % self.clients)


@dataclass(slots=True)
class BenchLoad:
    """A running load. ``stop`` may be called from a signal handler."""

    plan: LoadPlan
    open_client: OpenClient
    clock: Callable[[], float] = time.perf_counter
    meter: Meter = field(default_factory=Meter)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _broken: list[BaseException] = field(default_factory=list)
    _started_s: float = 0.0
    _ended_s: float = 0.0

    def start(self) -> None:
        self._started_s = self._ended_s = self.clock()
        for number in range(self.plan.clients):
            thread = threading.Thread(target=self._guarded, args=(number,), name=f"bench-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop sending; records in flight are still awaited."""
        self._stopping.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether all records were answered within the time. Raises a client's fatal error."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._broken:
            raise self._broken[0]
        return True

    @property
    def took_s(self) -> float:
        """Seconds from the start to the last response."""
        return self._ended_s - self._started_s

    def _guarded(self, number: int) -> None:
        try:
            with self.open_client() as submit:
                self._send(number, submit)
        except BaseException as error:  # noqa: BLE001 - told by ``wait``
            self._broken.append(error)
            self._stopping.set()

    def _send(self, number: int, submit: Submit) -> None:
        plan, clock = self.plan, self.clock
        room = threading.Semaphore(plan.in_flight)
        left = plan.share(number)
        until_s = None if plan.seconds is None else self._started_s + plan.seconds
        due_s = None if plan.rate is None else self._started_s + number / plan.rate
        sent = 0
        while not self._stopping.is_set() and sent != left:
            now_s = clock()
            if until_s is not None and now_s >= until_s:
                break
            if due_s is not None and due_s > now_s:
                self._stopping.wait(min(due_s - now_s, _LOOK_S))
                continue
            if not room.acquire(timeout=_LOOK_S):
                continue
            begun_s = clock() if due_s is None else due_s
            if due_s is not None and plan.rate is not None:
                due_s += plan.clients / plan.rate
            sent += 1
            try:
                submit().add_done_callback(partial(self._answered, begun_s, room))
            except DLedgerError as error:
                self._fail(error, room)

    def _answered(self, begun_s: float, room: threading.Semaphore, record: SentRecord) -> None:
        error = record.exception()
        if isinstance(error, DLedgerError):
            self._fail(error, room)
            return
        if error is not None:
            self._broken.append(error)
            self._stopping.set()
            return
        self._ended_s = now_s = self.clock()
        self.meter.acknowledge(now_s - begun_s)
        room.release()

    def _fail(self, error: DLedgerError, room: threading.Semaphore) -> None:
        self._ended_s = self.clock()
        self.meter.fail(error)
        if isinstance(error, _HOPELESS):
            self._stopping.set()
        room.release()


MB = 1_000_000


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``what`` names the kind of load, ``where`` its target."""

    what: str
    where: Mapping[str, str]
    plan: LoadPlan
    size: int
    measured: Measured
    seconds: float
    interrupted: bool

    @property
    def records_per_s(self) -> float:
        """Acknowledged records per second."""
        return self.measured.acknowledged / self.seconds if self.seconds > 0 else 0.0


def second_line(at_s: float, took_s: float, size: int, recent: Recent, failed: int) -> str:
    """A line about the last ``took_s``, short enough for a narrow terminal."""
    rate = recent.records / took_s
    line = f"{at_s:5.0f} s  {rate:>9,.0f}/s  {rate * size / MB:>7.2f} MB/s"
    if recent.records:
        line += f"  avg {_ms(recent.average_s)}  max {_ms(recent.max_s)}"
    return line + (f"  {failed:,} failed" if failed else "")


def lines(report: LoadReport) -> Iterator[str]:
    measured = report.measured
    yield f"records        {measured.acknowledged:,} of {report.size:,} bytes acknowledged in {report.seconds:.2f} s"
    yield f"rate           {report.records_per_s:,.0f} records/s, {report.records_per_s * report.size / MB:.2f} MB/s"
    if measured.average_s is not None and measured.max_s is not None:
        yield f"average        {_ms(measured.average_s)}"
        for percent, latency_s in measured.percentiles_s.items():
            yield f"p{percent:<13g} {_ms(latency_s)}"
        yield f"max            {_ms(measured.max_s)}"
    for one in measured.errors:
        outcome = "unknown outcome" if one.outcome == "unknown" else "not stored"
        yield f"failed         {one.count:,} {one.kind} ({outcome}), first: {one.first}"
    if report.interrupted:
        yield "interrupted: these are the figures until then"


def document(report: LoadReport) -> dict[str, object]:
    """For programs. Latencies are null if nothing was acknowledged."""
    plan, measured = report.plan, report.measured
    latencies = {"average": measured.average_s, "max": measured.max_s}
    latencies |= {f"p{percent:g}".replace(".", "_"): latency_s for percent, latency_s in measured.percentiles_s.items()}
    return {
        "load": report.what,
        **report.where,
        "size_bytes": report.size,
        "clients": plan.clients,
        "in_flight": plan.in_flight,
        "rate_limit_per_s": plan.rate,
        "seconds": report.seconds,
        "records": measured.acknowledged,
        "records_per_s": report.records_per_s,
        "mb_per_s": report.records_per_s * report.size / MB,
        "latency_ms": {name: None if one is None else one * 1000 for name, one in latencies.items()},
        "failed": measured.failed,
        "errors": [
            {"kind": one.kind, "outcome": one.outcome, "count": one.count, "first": one.first}
            for one in measured.errors
        ],
        "interrupted": report.interrupted,
    }


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:.2f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"
