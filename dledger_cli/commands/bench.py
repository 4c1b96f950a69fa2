"""``dledger bench``: measures the throughput and latency of a running group."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from dledger.command_line import flag_values
from dledger_cli import terminal
from dledger_cli.broker_target import BrokerTarget, broker_options
from dledger_cli.connection import GroupTarget, group_options
from dledger_cli.reporting import EXIT_FAILED, EXIT_UNKNOWN_OUTCOME, ErrorReportingGroup

if TYPE_CHECKING:
    from dledger_cli.bench.load import BenchLoad, LoadPlan, OpenClient, Submit
    from dledger_cli.bench.report import LoadReport

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
        from dledger_cli.bench.load import LoadPlan

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
    from dledger_cli.bench import report
    from dledger_cli.bench.load import BenchLoad

    load = BenchLoad(wanted.plan, open_client)
    with _stopping_by_signal(load) as caught:
        load.start()
        _watch(load, wanted.size)
    what = "append" if "group" in where else "send"
    found = report.LoadReport(what, where, wanted.plan, wanted.size, load.meter.read(), load.took_s, bool(caught))
    _print(wanted, found)
    if any(one.outcome == "unknown" for one in found.measured.errors):
        raise SystemExit(EXIT_UNKNOWN_OUTCOME)
    if found.measured.errors:
        raise SystemExit(EXIT_FAILED)
    if caught:
        raise SystemExit(128 + caught[0])


def _watch(load: BenchLoad, size: int) -> None:
    """Wait for the end of the load, printing a line every second on a terminal."""
    from dledger_cli.bench.report import second_line

    begun_s = before_s = time.monotonic()
    while not load.wait(_TICK_S):
        if sys.stderr.isatty():
            now_s = time.monotonic()
            recent, failed = load.meter.take_recent(), load.meter.failed
            click.echo(second_line(now_s - begun_s, now_s - before_s, size, recent, failed), err=True)
            before_s = now_s


def _print(wanted: _Wanted, found: LoadReport) -> None:
    from dledger_cli.bench import report

    if wanted.as_json:
        terminal.print_json(report.document(found))
    else:
        for line in report.lines(found):
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
