"""TLS and access keys of clients: the same record for every client of this project, whatever protocol it speaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from dledger.errors import ConfigError
from dledger.rpc.tls import TlsFiles

__all__ = ["ClientSecurity", "TlsFiles"]

NOT_SIGNED_FOR: Final = (
    "was not given to this client, and without TLS gets no signature, which anyone who answers there could use for "
    "ever: give this address, too, or use TLS"
)
"""The problem of an address outside ``signed_for``."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """TLS files and access key of a client. The default is plaintext, which is allowed for loopback addresses only.

    ``tls``: use TLS. ``insecure``: allow plaintext to other machines. ``access_key`` and ``secret_key``: sign every
    request with them. ``trust_name_servers``: sign in RocketMQ's way also for addresses that name servers, or brokers,
    tell, without TLS. Raises ``ConfigError`` if one of the two keys is missing.
    """

    tls: TlsFiles | None = None
    insecure: bool = False
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    trust_name_servers: bool = False

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError(["access key and secret key must be given together: one of them is missing"])


def signed_for(security: ClientSecurity | None, given: Iterable[str]) -> frozenset[str] | None:
    """The only addresses that requests signed in RocketMQ's way may go to; None if there is no such limit.

    Such a signature says neither what is asked, nor whom, nor when, so who gets one may use it anywhere, for ever. One
    wrong answer, from a process that had a broker's port for a moment, names any addresses as the other brokers, and is
    believed until these are asked again. With TLS, who answers there must have a certificate for that address.
    """
    if security is None or not security.access_key or security.tls is not None or security.trust_name_servers:
        return None
    return frozenset(given)
