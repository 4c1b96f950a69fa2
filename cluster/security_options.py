"""How commands protect what they say to the group, and show who they are: ``--tls-ca`` and the like, or variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from dledger.client.security import ClientSecurity


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """What was given on the command line or in the environment."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def for_client(self) -> ClientSecurity:
        """The same for a client. Raises ``ConfigError`` if something is missing."""
        from dledger.client.security import ClientSecurity, TlsFiles  # here, so that --help need not wait for gRPC
        from dledger.errors import ConfigError

        if self.tls_ca is not None:
            return ClientSecurity(TlsFiles(self.tls_ca, self.tls_cert, self.tls_key), insecure=self.insecure)
        if self.tls_cert is not None or self.tls_key is not None:
            raise ConfigError(["--tls-cert and --tls-key need --tls-ca (or DLEDGER_TLS_CA): whom to trust"])
        return ClientSecurity(insecure=self.insecure)


NO_SECURITY: Final = SecurityOptions()


def security_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--tls-ca``, ``--tls-cert``, ``--tls-key``, ``--insecure``, which reach the command as one ``security``."""

    @functools.wraps(command)
    def with_security(
        tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, insecure: bool, **others: object
    ) -> None:
        command(security=SecurityOptions(tls_ca, tls_cert, tls_key, insecure), **others)

    with_security = click.option(
        "--insecure",
        is_flag=True,
        envvar="DLEDGER_INSECURE",
        help="Talk plaintext to other machines (also DLEDGER_INSECURE).",
    )(with_security)
    for name, what in (
        ("key", "PEM file of its key (also DLEDGER_TLS_KEY)."),
        ("cert", "PEM file of our certificate, for servers that ask for one (also DLEDGER_TLS_CERT)."),
        ("ca", "Speak TLS; PEM file of the CA that made the servers' certificates (also DLEDGER_TLS_CA)."),
    ):
        with_security = click.option(
            f"--tls-{name}",
            envvar=f"DLEDGER_TLS_{name.upper()}",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=what,
        )(with_security)
    return with_security
