"""How commands find brokers.

Brokers are given (``-b HOST:PORT,…``, ``DLEDGER_BROKER``), or name servers that know them (``--namesrv HOST:PORT;…``,
``DLEDGER_NAMESRV``). Options precede the environment; in both, brokers precede name servers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption, check_place
from dledger_cli.chosen_brokers import ChosenBrokers
from dledger_cli.security_options import NO_SECURITY, CommandSecurity, security_options

if TYPE_CHECKING:
    from rocketstore.client.aio.consumer_options import ConsumerOptions, Topics
    from rocketstore.client.aio.producer import ProducerOptions
    from rocketstore.client.aio.rebalancer import Assign
    from rocketstore.client.blocking import Producer
    from rocketstore.client.blocking_consumer import Consumer

DEFAULT_BROKER = "127.0.0.1:10911"
"""Where a broker with default settings listens."""


@dataclass(frozen=True, slots=True)
class BrokerTarget:
    """The brokers that a command talks to: those at ``addresses``, or those that ``name_servers`` know, if given."""

    addresses: tuple[str, ...]
    timeout_s: float
    security: CommandSecurity = NO_SECURITY
    name_servers: tuple[str, ...] = ()
    broker_name: str = ""
    """Only this group of those that the name servers know."""

    @property
    def given_brokers(self) -> tuple[str, ...]:
        """The addresses of brokers that were given; none if name servers were."""
        return () if self.name_servers else self.addresses

    # Imported in the methods, so that --help does not load them.

    @contextmanager
    def brokers(self) -> Iterator[ChosenBrokers]:
        """The brokers over RocketMQ's protocol; the connections are closed after the block."""
        from rocketstore.client.blocking import Admin

        with Admin(
            None if self.name_servers else self.addresses,
            name_servers=self.name_servers or None,
            timeout_s=self.timeout_s,
            security=self.security.for_client(),
        ) as admin:
            yield ChosenBrokers(admin, self.broker_name)

    @contextmanager
    def sending(self, options: ProducerOptions | None = None) -> Iterator[Producer]:
        """A producer over RocketMQ's protocol; pending messages are sent at the end of the block."""
        from rocketstore.client.blocking import Producer

        with Producer(
            None if self.name_servers else self.addresses,
            name_servers=self.name_servers or None,
            timeout_s=self.timeout_s,
            security=self.security.for_client(),
            options=options,
        ) as producer:
            yield producer

    def consumer(self, group: str, topics: Topics, assign: Assign | None, options: ConsumerOptions) -> Consumer:
        """A consumer of all brokers, which the caller closes."""
        from rocketstore.client.blocking_consumer import Consumer

        return Consumer(
            None if self.name_servers else self.addresses,
            name_servers=self.name_servers or None,
            group=group,
            topics=topics,
            assign=assign,
            security=self.security.for_client(),
            options=options,
        )


def broker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name brokers, ``--timeout`` and the security options, all passed as one ``target``."""

    @security_options
    @functools.wraps(command)
    def with_target(  # one parameter per option
        broker: tuple[str, ...],
        namesrv: tuple[str, ...] | None,
        broker_name: str,
        timeout_s: float,
        security: CommandSecurity,
        **others: object,
    ) -> None:
        context = click.get_current_context()
        check_place(context, "broker", "namesrv")
        name_servers = namesrv if namesrv and precede(context, ("namesrv",), ("broker",)) else ()
        if broker_name and not name_servers:
            raise click.UsageError("--broker-name chooses among the brokers of name servers: give them (--namesrv)")
        command(target=BrokerTarget(broker, timeout_s, security, name_servers, broker_name), **others)

    with_target = click.option(
        "--timeout",
        "timeout_s",
        type=flag_values.Seconds(min=0, min_open=True),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="How long one request may take, retries included.",
    )(with_target)
    with_target = click.option(
        "--broker-name",
        default="",
        metavar="NAME",
        help="With name servers: only the brokers of this name.",
    )(with_target)
    with_target = click.option(
        "-n",
        "--namesrv",
        cls=ContextOption,
        envvar="DLEDGER_NAMESRV",
        metavar="HOST:PORT;…",
        callback=flag_values.addresses,
        help="Find the brokers by these name servers instead (also DLEDGER_NAMESRV).",
    )(with_target)
    return click.option(
        "-b",
        "--broker",
        cls=ContextOption,
        envvar="DLEDGER_BROKER",
        default=DEFAULT_BROKER,
        show_default=True,
        metavar="HOST:PORT,…",
        callback=flag_values.addresses,
        help="Listen addresses of some or all brokers (also DLEDGER_BROKER).",
    )(with_target)


_STRENGTH: Final = (
    click.core.ParameterSource.DEFAULT,
    click.core.ParameterSource.DEFAULT_MAP,  # a context
    click.core.ParameterSource.ENVIRONMENT,
    click.core.ParameterSource.COMMANDLINE,
)


def precede(context: click.Context, ones: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one of some parameters was given more explicitly than all of the others: as an option, not a variable."""

    def strength(names: Sequence[str]) -> int:
        sources = [context.get_parameter_source(name) for name in names]
        return max(_STRENGTH.index(one) if one in _STRENGTH else -1 for one in sources)

    return strength(ones) > strength(others)
