"""TLS and access keys of clients: the same record for every client of this project, whatever protocol it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field

from dledger.errors import ConfigError
from dledger.rpc.tls import TlsFiles

__all__ = ["ClientSecurity", "TlsFiles"]


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """TLS files and access key of a client. The default is plaintext, which is allowed for loopback addresses only.

    ``tls``: use TLS. ``insecure``: allow plaintext to other machines. ``access_key`` and ``secret_key``: sign every
    request with them. ``trust_name_servers``: sign in RocketMQ's way also for addresses that name servers tell, without
    TLS. Raises ``ConfigError`` if one of the two keys is missing.
    """

    tls: TlsFiles | None = None
    insecure: bool = False
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    trust_name_servers: bool = False

    def __post_init__(self) -> None:
        if bool(self.access_key) != bool(self.secret_key):
            raise ConfigError(["access key and secret key must be given together: one of them is missing"])
