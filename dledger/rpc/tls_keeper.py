"""The certificates in use, reloaded when their files change: without a restart, and never replaced by bad ones.

The files are checked whenever a connection begins, and now and then (``refresh``). Replacing several files takes a
moment in which they do not belong together; until they do, and whenever they are unusable, the old ones stay in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import grpc

from dledger.config import ClientAuth, SecurityConfig, ServerConfig
from dledger.errors import ConfigError, DLedgerError
from dledger.rpc import tls
from dledger.rpc.tls import FileWatch, TlsFiles, TlsMaterial

_LOG = logging.getLogger(__name__)

_EXPIRES_SOON: Final = timedelta(days=14)
_SETTLING_S: Final = 2.0
"""How long after a change mismatched files are tolerated before they are logged."""


@dataclass(frozen=True, slots=True)
class _InUse:
    """One generation of certificates."""

    version: int
    material: TlsMaterial
    client_ca: bytes
    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    naming_context: ssl.SSLContext
    client_facing_context: ssl.SSLContext
    expires_at: datetime | None
    names: tuple[str, ...]


class TlsKeeper:
    """A server's certificates. Thread-safe. The constructor raises ``ConfigError`` if the files are unusable.

    ``member``: the node id that the certificate must carry, None for a server without peers.
    """

    def __init__(self, security: SecurityConfig, *, name: str, member: str | None) -> None:
        cert, key, ca = security.tls_cert_path, security.tls_key_path, security.tls_trust_cert_path
        if cert is None or key is None or ca is None:
            raise ConfigError(security.problems(()) or ["TLS is not configured"])
        self._files = TlsFiles(ca, cert, key)
        self._client_ca = security.tls_client_trust_cert_path or ca
        self._client_auth = security.tls_client_auth
        self._name = name
        self._member = member
        self._lock = threading.Lock()  # held while the files are read
        self._watch = FileWatch((*self._files.paths, self._client_ca))
        self._watch.changed()
        self._complaint = ""
        self._warned_for = -1
        try:
            self._in_use = self._load(0)
        except DLedgerError as error:
            raise ConfigError([str(error)]) from error
        self._warn_of_the_end()

    @classmethod
    def of(cls, config: ServerConfig) -> TlsKeeper | None:
        """The keeper of a member; None for plaintext. Raises ``ConfigError``."""
        if not config.security.has_tls:
            return None
        return cls(config.security, name=str(config.node_id), member=str(config.node_id))

    # -- what is in use ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Increases with every reload."""
        return self._in_use.version

    @property
    def expires_at(self) -> datetime | None:
        """When our certificate expires, if known."""
        return self._in_use.expires_at

    @property
    def names(self) -> tuple[str, ...]:
        """The DNS names in our certificate; empty if our CA does not trust it."""
        return self._in_use.names

    def refresh(self) -> None:
        """Reload the files if they have changed and are usable. Never raises: a server keeps what it has."""
        with self._lock:
            if self._watch.changed():
                self._renew()
        self._warn_of_the_end()

    def accepting(self) -> ssl.SSLContext:
        """For a connection from a peer."""
        self.refresh()
        return self._in_use.server_context

    def accepting_clients(self) -> ssl.SSLContext:
        """For a connection that a client begins."""
        self.refresh()
        return self._in_use.client_facing_context

    def connecting(self) -> ssl.SSLContext:
        """For a connection to a peer; the caller must check the peer's name."""
        self.refresh()
        return self._in_use.client_context

    def connecting_by_name(self) -> ssl.SSLContext:
        """For a connection to a port for clients, whose certificate must have the name or address dialled."""
        self.refresh()
        return self._in_use.naming_context

    def client_server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server for clients."""
        given = self._in_use

        def latest() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at every handshake; None keeps what it has."""
            nonlocal given
            self.refresh()
            if self._in_use is given:
                return None
            given = self._in_use
            return self._for_clients(given)

        return grpc.dynamic_ssl_server_credentials(
            self._for_clients(given),
            latest,  # type: ignore[arg-type]  # grpc-stubs knows no None
            self._client_auth is not ClientAuth.NONE,
        )

    def _for_clients(self, in_use: _InUse) -> grpc.ServerCertificateConfiguration:
        pairs = [(in_use.material.key or b"", in_use.material.chain or b"")]
        client_ca = None if self._client_auth is ClientAuth.NONE else in_use.client_ca
        return grpc.ssl_server_certificate_configuration(pairs, client_ca)

    # -- reloading -----------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        try:
            self._in_use = self._load(self._in_use.version + 1)
        except (DLedgerError, OSError, ValueError) as error:
            if self._watch.age_s < _SETTLING_S:
                self._watch.again()  # they may still be changing
            elif str(error) != self._complaint:
                self._complaint = str(error)
                _LOG.error("%s keeps its old TLS certificate because the new files are unusable: %s", self._name, error)
            return
        self._complaint = ""
        _LOG.info("%s switched to its new TLS certificate, %s", self._name, self._validity)

    def _load(self, version: int) -> _InUse:
        material = tls.read(self._files)
        client_ca = tls.read(TlsFiles(self._client_ca)).ca
        expires_at = None
        names: tuple[str, ...] = ()
        try:
            certificate = tls.rehearse(material)
            names = tls.names_of(certificate)
            if self._member is not None:
                tls.check_name(names, self._member, f"in {self._files.cert}")
            expires_at = tls.expires_at(certificate)
        except DLedgerError as error:
            if self._member is not None:
                raise
            if str(error) != self._complaint:  # a public certificate, with a private CA for those of clients
                self._complaint = str(error)
                _LOG.warning("%s: clients may reject its TLS certificate: %s", self._name, error)
        client_facing = tls.server_context(replace(material, ca=client_ca))
        if self._client_auth is ClientAuth.NONE:
            client_facing.verify_mode = ssl.CERT_NONE
        client_facing.set_alpn_protocols(
            ["h2"]
        )  # remoting's clients offer none; gRPC's are told that it is the wrong port
        naming = tls.client_context(material)
        naming.check_hostname = True
        return _InUse(
            version,
            material,
            client_ca,
            tls.server_context(material),
            tls.client_context(material),
            naming,
            client_facing,
            expires_at,
            names,
        )

    @property
    def _validity(self) -> str:
        return f"valid until {self.expires_at:%Y-%m-%d %H:%M} UTC" if self.expires_at else "of unknown expiry"

    def _warn_of_the_end(self) -> None:
        """Log an approaching expiry once per certificate; and once more when it has expired."""
        in_use = self._in_use
        if in_use.expires_at is None:
            return
        left = in_use.expires_at - datetime.now(UTC)
        stage = 2 * in_use.version + (left < timedelta())
        if left < _EXPIRES_SOON and self._warned_for < stage:
            self._warned_for = stage
            _LOG.warning("%s: the TLS certificate %s is %s: renew it", self._name, self._files.cert, self._validity)
