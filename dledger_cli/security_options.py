"""TLS and access keys of commands: options such as ``--tls-ca``, or environment variables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from dledger.command_line.contexts import ContextOption

if TYPE_CHECKING:
    from dledger.client.shared import ClientSecurity


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
