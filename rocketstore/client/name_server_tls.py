"""How clients connect to name servers: with the TLS files that they use for brokers."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from dledger.client.security import ClientSecurity, TlsFiles
from dledger.errors import ConfigError
from dledger.rpc import tls
from dledger.values import plaintext_problems


def context_maker(addresses: Sequence[str], security: ClientSecurity) -> ContextMaker | None:
    """None: plaintext. Raises ``ConfigError`` for unusable files, and for plaintext to other machines."""
    if security.tls is not None:
        return ContextMaker(security.tls)
    check_plaintext(addresses, security)
    return None


def check_plaintext(addresses: Sequence[str], security: ClientSecurity) -> None:
    """Raises ``ConfigError`` for addresses, given or learnt, that would need plaintext beyond this machine."""
    if security.tls is not None or security.insecure:
        return
    if problems := plaintext_problems(
        addresses,
        "use TLS (--tls-ca, DLEDGER_TLS_CA; in Python security=ClientSecurity(tls=TlsFiles(…)))",
        "pass --insecure (in Python ClientSecurity(insecure=True))",
    ):
        raise ConfigError(problems)


class ContextMaker:
    """Gives a context that checks the servers' names; created once."""

    def __init__(self, files: TlsFiles) -> None:
        self._context = tls.client_context(tls.read(files))
        self._context.check_hostname = True

    def __call__(self) -> ssl.SSLContext:
        return self._context
