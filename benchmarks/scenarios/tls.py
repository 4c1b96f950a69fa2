"""The cost of TLS: the same load on two groups, one with it and one without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.load import LoadClient
from benchmarks.registry import Scenario, load
from benchmarks.scenarios.appends import BODY_BYTES, WINDOWS
from benchmarks.scenarios.brokers import MESSAGE, prepare
from benchmarks.sending import send_rate
from benchmarks.targets import PLAINTEXT
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from rocketstore.client.blocking import Admin, Producer


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Each pair runs side by side and alternates, so that the machine's load affects both."""
    if "tls_append_pipelined" in names:
        yield measure_appends(context)
    if "tls_broker_send" in names:
        yield measure_sends(context)


def measure_appends(context: Context) -> Figure:
    """One client, pipelined, TLS between it and the leader and between the members."""
    settings = context.settings
    window = WINDOWS["append_pipelined"][0]
    with ExitStack() as stack:
        rates: list[Callable[[], float]] = []
        for name, tls in (("with-tls", True), ("plaintext", False)):
            group = stack.enter_context(LocalGroup(context.directory / name, name=name, tls=tls))
            group.leader()
            directory = group.tls.directory if group.tls is not None else None
            client = stack.enter_context(
                LoadClient(group.addresses, group.name, context.directory / f"{name}.log", tls=directory)
            )
            rates.append(
                partial(client.appends_per_second, settings.seconds, settings.warmup_seconds, BODY_BYTES, window)
            )
        return _in_turns(context, "tls_append_pipelined", rates, "entries/s")


def measure_sends(context: Context) -> Figure:
    """One pipelined producer, quorum flush."""
    settings = context.settings
    with ExitStack() as stack:
        rates: list[Callable[[], float]] = []
        for name, tls in (("brokers-with-tls", True), ("brokers-plaintext", False)):
            brokers = stack.enter_context(LocalBrokers(context.directory / name, tls=tls))
            brokers.master()
            with Admin(brokers.addresses, security=brokers.security) as admin:
                prepare(admin)
            producer = stack.enter_context(Producer(brokers.addresses, timeout_s=30, security=brokers.security))
            send_rate(producer, MESSAGE, settings.warmup_seconds)
            rates.append(partial(send_rate, producer, MESSAGE, settings.seconds))
        return _in_turns(context, "tls_broker_send", rates, "messages/s")


def _in_turns(context: Context, name: str, rates: Sequence[Callable[[], float]], unit: str) -> Figure:
    """The medians of the rounds: with TLS and, as its baseline, without."""
    rounds = [[rate() for rate in rates] for _ in range(context.settings.rounds)]
    for with_tls, plaintext in rounds:
        context.say(f"  {with_tls:,.0f} {unit} with TLS, {plaintext:,.0f} without: {with_tls / plaintext:.2f}")
    return Figure.median(name, [one[0] for one in rounds], unit, PLAINTEXT, [one[1] for one in rounds])


SCENARIO: Final = Scenario(
    "TLS: three nodes with it beside three without", ("tls_append_pipelined", "tls_broker_send"), measure, load(6)
)
