"""How commands find the group or the brokers they talk to, with which keys and certificates, and which of the brokers.

A group is given by its members (``-b HOST:PORT,…``, ``DLEDGER_BOOTSTRAP``). Brokers are given (``-b HOST:PORT,…``,
``DLEDGER_BROKER``), or name servers that know them (``--namesrv HOST:PORT;…``, ``DLEDGER_NAMESRV``). Options precede
the environment; in both, brokers precede name servers. TLS and access keys are options such as ``--tls-ca``, or
environment variables.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click
from click.core import ParameterSource

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption, check_place
from dledger.errors import IdentityError

if TYPE_CHECKING:
    from dledger.client import DLedgerClient
    from dledger.client.shared import ClientSecurity
    from rocketstore.client.aio.admin_requests import TopicInfo
    from rocketstore.client.aio.consumer_options import ConsumerOptions, Topics
    from rocketstore.client.aio.producer import ProducerOptions
    from rocketstore.client.aio.rebalancer import Assign
    from rocketstore.client.aio.routes import RoutedBroker
    from rocketstore.client.blocking import Admin, Producer
    from rocketstore.client.blocking_consumer import Consumer


@dataclass(frozen=True, slots=True)
class CommandSecurity:
    """Values from the command line or the environment."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    trust_name_servers: bool = False

    def for_client(self) -> ClientSecurity:
        """The same as settings for a client. Raises ``ConfigError`` if something is missing."""
        from dledger.client.shared import ClientSecurity, TlsFiles  # here, so that --help does not load it
        from dledger.errors import ConfigError

        if self.access_key and not self.secret_key:
            raise ConfigError(
                ["--access-key requires its secret: set DLEDGER_SECRET_KEY, or name its file with --secret-key-file"]
            )
        if self.secret_key and not self.access_key:
            raise ConfigError(["secret key without access key: set DLEDGER_ACCESS_KEY (--access-key)"])
        if self.tls_ca is None and (self.tls_cert is not None or self.tls_key is not None):
            raise ConfigError(["--tls-cert and --tls-key require --tls-ca (or DLEDGER_TLS_CA)"])
        tls = None if self.tls_ca is None else TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)
        return ClientSecurity(tls, self.insecure, self.access_key, self.secret_key, self.trust_name_servers)


def _secret_key(file: Path | None) -> str:
    """Reads a file or the environment; never an option, because other users can see command lines.

    A context's file is for the context's access key: the environment wins over both, and another key needs another one.
    """
    secret = os.environ.get("DLEDGER_SECRET_KEY", "")
    source_of = click.get_current_context().get_parameter_source
    of_context = source_of("secret_key_file") is ParameterSource.DEFAULT_MAP
    if file is None or (of_context and (secret or source_of("access_key") is not ParameterSource.DEFAULT_MAP)):
        return secret
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.BadParameter(f"{file} cannot be read: {reason}", param_hint="--secret-key-file") from error


NO_SECURITY: Final = CommandSecurity()


def security_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for TLS and access keys, passed to the command as one ``security``."""

    @functools.wraps(command)
    def with_security(  # one parameter per option
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        insecure: bool,
        access_key: str,
        secret_key_file: Path | None,
        trust_name_servers: bool,
        **others: object,
    ) -> None:
        secret_key = _secret_key(secret_key_file)
        security = CommandSecurity(tls_ca, tls_cert, tls_key, insecure, access_key, secret_key, trust_name_servers)
        command(security=security, **others)

    with_security = click.option(
        "--trust-name-servers",
        cls=ContextOption,
        is_flag=True,
        envvar="DLEDGER_TRUST_NAME_SERVERS",
        help="Sign requests in RocketMQ's way for addresses that name servers, or brokers, tell, even without TLS "
        "(also DLEDGER_TRUST_NAME_SERVERS). Anyone who answers there can use such a signature for other requests.",
    )(with_security)
    with_security = click.option(
        "--secret-key-file",
        cls=ContextOption,
        envvar="DLEDGER_SECRET_KEY_FILE",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File with the secret of the access key (also DLEDGER_SECRET_KEY_FILE; or set the secret in "
        "DLEDGER_SECRET_KEY).",
    )(with_security)
    with_security = click.option(
        "--access-key",
        cls=ContextOption,
        envvar="DLEDGER_ACCESS_KEY",
        default="",
        metavar="KEY",
        help="Access key to sign requests with, if access control is on (also DLEDGER_ACCESS_KEY).",
    )(with_security)
    with_security = click.option(
        "--insecure",
        cls=ContextOption,
        is_flag=True,
        envvar="DLEDGER_INSECURE",
        help="Allow plaintext to other machines (also DLEDGER_INSECURE).",
    )(with_security)
    for name, what in (
        ("key", "PEM file of its key (also DLEDGER_TLS_KEY)."),
        ("cert", "PEM file of the client certificate, for servers that require one (also DLEDGER_TLS_CERT)."),
        ("ca", "Use TLS; PEM file of the CA that signed the servers' certificates (also DLEDGER_TLS_CA)."),
    ):
        with_security = click.option(
            f"--tls-{name}",
            cls=ContextOption,
            envvar=f"DLEDGER_TLS_{name.upper()}",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=what,
        )(with_security)
    return with_security


class ChosenBrokers:
    """The brokers a command is about: all of one cluster, those that have a topic, or those of ``--broker-name``.

    ``admin`` finds them; ``name``: only those of this name. Brokers are called by their names.
    """

    def __init__(self, admin: Admin, name: str = "") -> None:
        self.admin = admin
        self.name = name

    def every(self) -> list[str]:
        """All of them, by name. Raises ``UsageError`` if they are of several clusters."""
        found = self.found()
        if len({one.cluster for one in found}) > 1:
            raise click.UsageError(f"there are several clusters: {_names(found)}; choose one group with --broker-name")
        return [one.name for one in found]

    def only_one(self) -> str:
        """The only name. Raises ``UsageError`` if there are several."""
        found = self.found()
        if len(found) > 1:
            _refuse_several([one.name for one in found])
        return found[0].name

    def addresses(self) -> tuple[str, ...]:
        """Those of the only name, the master's first. Raises ``UsageError`` if there are several."""
        name = self.only_one()
        return next(one.readable for one in self.found() if one.name == name)

    def with_topic(self, topic: str) -> list[TopicInfo]:
        """The topic as it is at each. Raises ``NotFoundError`` if none has it."""
        from rocketstore.client.aio.errors import NotFoundError  # here, so that --help does not load it

        if self.name:
            self.found()
        found = [one for one in self.admin.topic(topic) if self.name in ("", one.broker)]
        if not found:
            raise NotFoundError(f"topic {topic} does not exist at the brokers {self.name}")
        return found

    def only_one_with(self, topic: str) -> TopicInfo:
        """The topic at the only name that has it. Raises ``UsageError`` if there are several."""
        found = self.with_topic(topic)
        if len(found) > 1:
            _refuse_several([one.broker for one in found])
        return found[0]

    def found(self) -> Sequence[RoutedBroker]:
        """At least one. Raises ``NotFoundError`` for an unknown name, with those that exist."""
        from rocketstore.client.aio.errors import NotFoundError

        known = self.admin.brokers()
        found = [one for one in known if self.name in ("", one.name)]
        if not found:
            names = ", ".join(one.name for one in known)
            raise NotFoundError(f"no brokers named {self.name} have registered, only {names}")
        return found


def _refuse_several(names: Collection[str]) -> NoReturn:
    raise click.UsageError(
        f"there are several groups of brokers: {', '.join(sorted(names))}; choose one with --broker-name"
    )


def _names(brokers: Sequence[RoutedBroker]) -> str:
    return ", ".join(f"{one.name} (cluster {one.cluster})" for one in brokers)


DEFAULT_BOOTSTRAP = "127.0.0.1:30911"
"""The default client address of a single node."""


@dataclass(frozen=True, slots=True)
class GroupTarget:
    """The group a command talks to."""

    bootstrap: tuple[str, ...]
    group: str
    timeout_s: float
    security: CommandSecurity = NO_SECURITY

    def client(self, *, enable_idempotence: bool = True) -> DLedgerClient:
        """A client for it, which the caller closes; see there for ``enable_idempotence``."""
        from dledger.client import DLedgerClient  # here, so that --help does not load it

        return DLedgerClient(
            self.bootstrap,
            group=self.group,
            timeout_s=self.timeout_s,
            security=self.security.for_client(),
            enable_idempotence=enable_idempotence,
        )


def group_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--bootstrap``, ``--group``, ``--timeout`` and the security options, passed on as one ``target``."""

    @security_options
    @functools.wraps(command)
    def with_target(
        bootstrap: tuple[str, ...], group: str, timeout_s: float, security: CommandSecurity, **others: object
    ) -> None:
        check_place(click.get_current_context(), "bootstrap", "nodes", "namesrv")  # the last two: of the console
        try:
            command(target=GroupTarget(bootstrap, group, timeout_s, security), **others)
        except IdentityError as error:
            told = IdentityError(f"{error}: choose the group with --group")
            told.outcome = error.outcome
            raise told from error

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
        "-g", "--group", cls=ContextOption, default="default", show_default=True, help="Name of the group."
    )(with_target)
    return click.option(
        "-b",
        "--bootstrap",
        cls=ContextOption,
        envvar="DLEDGER_BOOTSTRAP",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        metavar="HOST:PORT,…",
        callback=flag_values.addresses,
        help="Client addresses of some or all nodes (also DLEDGER_BOOTSTRAP).",
    )(with_target)


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
