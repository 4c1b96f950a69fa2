"""gRPC channels with a client's TLS files and access key, and what keeps one from connecting."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable
from typing import Final

import grpc

from dledger.access.signing import Signer
from dledger.client.security import ClientSecurity
from dledger.client.signing import SigningInterceptor, async_interceptors
from dledger.errors import ConfigError, DLedgerError, TlsError, UnavailableError
from dledger.rpc import options, tls
from dledger.rpc.file_watch import FileWatch
from dledger.values import parse_address, plaintext_problems

_LOOK_INTERVAL_S: Final = 1.0
"""How often to check whether the files changed, and how long a diagnosis holds."""
NOWHERE: Final = "ipv4:127.0.0.1:0"
"""An address that no eavesdropper can observe."""
_PROBE_TIMEOUT_S: Final = 0.5
_PATIENCE_S: Final = 0.05
"""How long to wait for a server that closes the connection before receiving anything."""
_HTTP2_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_REMOTING_HEADER: Final = b'{"code":106,"language":"OTHER","version":0,"opaque":1,"flag":0}'
_REMOTING_REQUEST: Final = struct.pack(">II", 4 + len(_REMOTING_HEADER), len(_REMOTING_HEADER)) + _REMOTING_HEADER
"""RocketMQ's request for the list of brokers, which any server of its protocol answers, if only with an error."""


class ChannelMaker:
    """Makes a client's channels; one per client. Thread-safe.

    Raises ``ConfigError`` for files that cannot be used, and for plaintext that would leave this machine.
    """

    def __init__(self, security: ClientSecurity | None, addresses: Iterable[str]) -> None:
        self.security = security or ClientSecurity()
        key = self.security.access_key
        self._signer = Signer(key, self.security.secret_key) if key else None
        files = self.security.tls
        self._lock = threading.Lock()  # guards what follows
        self._watch: FileWatch | None = None
        self._material: tls.TlsMaterial | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._version = 0
        self._look_at = 0.0
        self._diagnoses: dict[str, tuple[float, TlsError | None]] = {}
        if files is not None:
            self._watch = FileWatch(files.paths)
            self._watch.changed()
            self._use(tls.read(files))
        elif problems := self._problems(addresses):
            raise ConfigError(problems)

    def _problems(self, addresses: Iterable[str]) -> list[str]:
        """Why these addresses must not be dialled."""
        if self.security.tls is not None or self.security.insecure:
            return []
        return plaintext_problems(
            addresses,
            "use TLS (--tls-ca, --tls-cert, --tls-key; in Python security=ClientSecurity(tls=TlsFiles(…)))",
            "pass --insecure (in Python ClientSecurity(insecure=True))",
        )

    @property
    def version(self) -> int:
        """Increases when the files change: existing channels keep using the old content."""
        if self._watch is not None and time.monotonic() >= self._look_at:
            with self._lock:
                self._look_at = time.monotonic() + _LOOK_INTERVAL_S
                if self._watch.changed():
                    self._renew()
        return self._version

    def open(self, address: str) -> grpc.Channel:
        """A channel for threads.

        For an address learnt from a server that would need plaintext beyond this machine, it is one that never
        connects, and ``diagnose`` returns the reason.
        """
        if self._credentials is None:
            channel = grpc.insecure_channel(self._plaintext(address), options.client_channel_options())
        else:
            channel = grpc.secure_channel(address, self._credentials, options.client_channel_options())
        if self._signer is None:
            return channel
        return grpc.intercept_channel(channel, SigningInterceptor(self._signer, address))

    def open_async(self, address: str) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        signing = None if self._signer is None else async_interceptors(self._signer, address)
        if self._credentials is None:
            return grpc.aio.insecure_channel(
                self._plaintext(address), options.client_channel_options(), interceptors=signing
            )
        return grpc.aio.secure_channel(
            address, self._credentials, options.client_channel_options(), interceptors=signing
        )

    def _plaintext(self, address: str) -> str:
        return NOWHERE if self._problems([address]) else address

    def _use(self, material: tls.TlsMaterial) -> None:
        self._material = material
        self._credentials = channel_credentials(material)

    def _renew(self) -> None:
        files = self.security.tls
        try:
            if files is not None:
                self._use(tls.read(files))
                self._version += 1
        except DLedgerError:  # half-written, perhaps: keep the old ones and check again later
            if self._watch is not None:
                self._watch.again()

    # --- why a connection failed ------------------------------------------------------------------------------------

    def diagnose(self, failure: DLedgerError, address: str) -> DLedgerError:
        """Return the failure, or if TLS caused it a ``TlsError`` that says so; may take a moment.

        gRPC reports a server that requires TLS, or another certificate, only as a closed connection. So the connection
        is tried again without gRPC, to see what the server sends before it closes.
        """
        if isinstance(failure, UnavailableError) and (problems := self._problems([address])):
            return TlsError(f"a server named {address} as another server, but {problems[0]}")
        if not isinstance(failure, UnavailableError) or not tls.is_silent_refusal(str(failure)):
            return failure
        with self._lock:
            until, known = self._diagnoses.get(address, (0.0, None))
        if time.monotonic() >= until:
            known = self._probe(address)
            with self._lock:
                self._diagnoses[address] = (time.monotonic() + _LOOK_INTERVAL_S, known)
        return known or failure

    def _probe(self, address: str) -> TlsError | None:
        try:
            with socket.create_connection(parse_address(address), _PROBE_TIMEOUT_S) as link:
                if _hangs_up_by_itself(link):
                    return None
                return self._probe_plain(link, address) if self._material is None else self._probe_tls(link, address)
        except (OSError, ValueError):
            return None

    def _probe_plain(self, link: socket.socket, address: str) -> TlsError | None:
        link.sendall(_HTTP2_GREETING)
        try:
            answer = link.recv(len(_HTTP2_GREETING))
        except ConnectionError:
            answer = b""
        if answer and answer[0] != tls.ALERT_RECORD:
            return None
        if not answer and _speaks_remoting(address):
            return TlsError(
                f"{address} is a name server, or one of RocketMQ's own brokers, which do not speak gRPC: give a name "
                "server with --namesrv (topic, message, consumer, cluster list, console; in Python name_servers=…), "
                "and here the address of a node or broker of this project"
            )
        return TlsError(
            f"{address} closed the plaintext connection, probably because it requires TLS: give the CA of its "
            "certificate (--tls-ca, DLEDGER_TLS_CA; in Python ClientSecurity(tls=TlsFiles(…)))"
        )

    def _probe_tls(self, link: socket.socket, address: str) -> TlsError | None:
        material = self._material
        if material is None:
            return None
        context = tls.client_context(material)
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(link) as sealed:
                if sealed.recv(1):
                    return None
        except (ssl.SSLEOFError, ConnectionError):
            pass  # as if it had closed the connection properly: gRPC sends no alert with a reason
        except ssl.SSLError as error:
            return TlsError(tls.explain(error, address))
        files = material.files
        if files.cert is None:
            return TlsError(
                f"{address} closed the connection because it requires a client certificate: give one (--tls-cert and "
                "--tls-key, DLEDGER_TLS_CERT and DLEDGER_TLS_KEY; in Python TlsFiles(ca, cert, key))"
            )
        why = tls.client_problem(material) or "probably not signed by a CA that the server trusts for clients"
        return TlsError(f"{address} rejected our certificate {files.cert}: {why}")


def channel_credentials(material: tls.TlsMaterial) -> grpc.ChannelCredentials:
    """Those of a client: what gRPC makes of the files."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.chain)


def _hangs_up_by_itself(link: socket.socket) -> bool:
    """Whether the connection closes although we sent nothing, like that of a proxy whose server is not running.

    A container's published port is such a proxy. A TLS server waits for the client's first bytes.
    """
    link.settimeout(_PATIENCE_S)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    finally:
        link.settimeout(_PROBE_TIMEOUT_S)


def _speaks_remoting(address: str) -> bool:
    """Whether the server answers a request of RocketMQ's protocol."""
    try:
        with socket.create_connection(parse_address(address), _PROBE_TIMEOUT_S) as link:
            link.settimeout(_PROBE_TIMEOUT_S)
            link.sendall(_REMOTING_REQUEST)
            return b"{" in link.recv(64)[8:]  # after both lengths, a header in JSON
    except (OSError, ValueError):
        return False
