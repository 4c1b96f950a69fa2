"""How commands find the group: ``-b HOST:PORT,…`` or ``DLEDGER_BOOTSTRAP``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from dledger.command_line import flag_values
from dledger.command_line.contexts import ContextOption, check_place
from dledger.errors import IdentityError
from dledger_cli.security_options import NO_SECURITY, CommandSecurity, security_options

if TYPE_CHECKING:
    from dledger.client import DLedgerClient

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
