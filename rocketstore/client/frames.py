"""The connections of threaded clients to name servers."""

from __future__ import annotations

from collections.abc import Sequence

from dledger.client.security import ClientSecurity
from dledger.remoting.blocking import BlockingRemotingClient
from rocketstore.client.name_server_tls import context_maker


def open_frames(addresses: Sequence[str], security: ClientSecurity) -> BlockingRemotingClient:
    """Connects on demand. Raises ``ConfigError`` for unusable files, and for plaintext to other machines."""
    return BlockingRemotingClient(tls=context_maker(addresses, security))
