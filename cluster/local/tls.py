"""Certificates for a group of local processes, created with the group, in its directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dledger.types import NodeId

if TYPE_CHECKING:
    from dledger.client.security import ClientSecurity


class LocalTls:
    """A CA, a certificate for each node, and one for clients."""

    def __init__(self, directory: Path, nodes: Iterable[NodeId]) -> None:
        from cluster import certs  # here: it needs an optional package

        self.directory = directory
        certs.make_authority(directory)
        for node in nodes:
            certs.make_node(directory, node)
        certs.make_client(directory, "client")

    def settings(self, node: NodeId) -> dict[str, str]:
        """The TLS settings of a node."""
        return {
            "tls_cert_path": str(self.directory / f"{node}.crt"),
            "tls_key_path": str(self.directory / f"{node}.key"),
            "tls_trust_cert_path": str(self.directory / "ca.crt"),
        }

    def client(self, name: str = "client") -> ClientSecurity:
        """The TLS settings of a client."""
        return client_security(self.directory, name)


def client_security(directory: Path, name: str = "client") -> ClientSecurity:
    """Client settings for a certificate in a directory made by ``dledger certs``."""
    from dledger.client.security import ClientSecurity, TlsFiles  # here, so that --help does not load gRPC

    return ClientSecurity(TlsFiles(directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key"))
