"""TLS: certificate files, the contexts and credentials made of them, and explanations of their problems.

Certificates are read once and used from memory everywhere: the verified content is what is presented, whatever happens
to the files meanwhile. Verification is never switched off, and a certificate's common name is ignored: the
subjectAltName identifies its owner.

``TlsStream`` is TLS as a transformation of bytes, without a socket: its user does the I/O. ``ssl.SSLSocket`` would not
do, because one thread reads a push connection and another one writes to it: OpenSSL's objects do not support that, and
a lock around a blocking read would keep the writer waiting for ever. Here a lock is held only while bytes are
transformed.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from dledger.errors import ConfigError, TlsError

READ_BYTES: Final = 256 * 1024
"""How much is read from a socket at a time: several TLS records (of 16 KiB)."""
SEAL_BYTES: Final = 128 * 1024
"""How much is sealed at a time: it stays in the processor's cache, and the other side can start reading."""
_RECORD_BYTES: Final = 16 * 1024


class TlsStream:
    """One connection's TLS: ``shake_hands`` until ``agreed``, then ``feed`` and ``read``, or ``seal``.

    An ``ssl.SSLError`` ends it.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.agreed = False
        """Whether the handshake is done, and with it the other side's certificate (if any) verified."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()  # guards the three above

    @property
    def certificate(self) -> Mapping[str, object]:
        """The other side's certificate, in ``ssl``'s form; empty if there is none."""
        return self._object.getpeercert() or {}

    @property
    def version(self) -> str:
        """The protocol version, for people."""
        return self._object.version() or "TLS"

    def shake_hands(self, received: bytes) -> bytes:
        """Continue the handshake with received bytes; returns the bytes to send."""
        with self._lock:
            self._incoming.write(received)
            try:
                self._object.do_handshake()
                self.agreed = True
            except ssl.SSLWantReadError:
                pass
            return self._outgoing.read()

    def feed(self, received: bytes | memoryview) -> None:
        with self._lock:
            self._incoming.write(received)

    def read(self) -> bytes:
        """The decrypted bytes received so far. Raises ``EOFError`` once the other side has closed TLS."""
        with self._lock:
            parts: list[bytes] = []
            try:
                while part := self._object.read(_RECORD_BYTES):
                    parts.append(part)
            except ssl.SSLWantReadError:
                return b"".join(parts)
            except ssl.SSLZeroReturnError:
                pass
            if parts:
                return b"".join(parts)
            raise EOFError("the other side closed TLS")

    def read_into(self, room: memoryview) -> int:
        """``read`` into a buffer; returns the number of bytes."""
        with self._lock:
            got, read = 0, self._object.read
            try:
                while got < len(room):
                    count: int = read(len(room) - got, room[got:])  # type: ignore[assignment]  # typeshed: bytes
                    if not count:
                        break
                    got += count
            except ssl.SSLWantReadError:
                return got
            except ssl.SSLZeroReturnError:
                pass
            if got or not room:
                return got
            raise EOFError("the other side closed TLS")

    def seal(self, data: bytes | memoryview) -> bytes:
        """Encrypt ``data``; send the results in the order of the calls, or the other side reads nothing."""
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    @property
    def has_due(self) -> bool:
        """Whether ``due`` has bytes to send."""
        return self._outgoing.pending > 0

    def due(self) -> bytes:
        """Bytes that TLS itself has to send: new keys, or after an ``SSLError`` the alert. In order with ``seal``'s
        results.
        """
        with self._lock:
            return self._outgoing.read()


_MAKE_CERTIFICATES: Final = "`dledger certs` creates suitable ones"
_REHEARSAL_ROUNDS: Final = 8
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"})

_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "it requires a client certificate, and we sent none",
    "HANDSHAKE_FAILURE": "it refused the handshake; perhaps it requires a client certificate",
    "UNKNOWN_CA": "it does not trust the CA of our certificate",
    "CERTIFICATE_EXPIRED": "it says our certificate has expired or is not valid yet",
    "BAD_CERTIFICATE": "it rejected our certificate",
    "UNSUPPORTED_CERTIFICATE": "our certificate is not valid for this use (extendedKeyUsage)",
    "CERTIFICATE_UNKNOWN": "it rejected our certificate",
    "DECRYPT_ERROR": "it rejected our certificate's signature: is there another CA of the same name?",
    "ACCESS_DENIED": "it rejected our certificate",
    "PROTOCOL_VERSION": "it supports none of the TLS versions we offer",
    "INTERNAL_ERROR": "it failed",
}
"""The meaning of the other side's alerts; OpenSSL's names of alerts end with these words."""
_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: ``ca`` holds the trusted CAs; ``cert`` and ``key``, given both or neither, are our identity.

    ``cert`` starts with our own certificate; intermediate certificates up to the CA's may follow.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError(["TLS certificate and key must be given together: one of them is missing"])

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The contents of the files. ``chain`` and ``key`` are None for a client without a certificate."""

    files: TlsFiles
    ca: bytes
    chain: bytes | None = None
    key: bytes | None = None


def read(files: TlsFiles) -> TlsMaterial:
    """Read the files and check that they belong together. Raises ``ConfigError`` naming the file and its problem."""
    ca = _pem(files.ca, b"CERTIFICATE")
    if files.cert is None or files.key is None:
        material = TlsMaterial(files, ca)
    else:
        key = _pem(files.key, b"PRIVATE KEY")
        if b"ENCRYPTED" in key:
            raise ConfigError(
                [f"{files.key}: the key is encrypted: use an unencrypted key that only its owner can read"]
            )
        material = TlsMaterial(files, ca, _pem(files.cert, b"CERTIFICATE"), key)
    client_context(material)
    return material


def _pem(path: Path, what: bytes) -> bytes:
    data = _read_file(path)
    if what + b"-----" not in data:
        raise ConfigError([f"{path}: contains no PEM {what.decode().lower()}"])
    return data


def _read_file(path: Path) -> bytes:
    """Raises ``ConfigError`` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error


# --- contexts --------------------------------------------------------------------------------------------------------


def server_context(material: TlsMaterial) -> ssl.SSLContext:
    """For accepting connections: the other side must present a certificate. Raises ``ConfigError``."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, material)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # connections are few and long, so none is resumed
    return context


def client_context(material: TlsMaterial) -> ssl.SSLContext:
    """For connecting; verifies the certificate but not its names, see ``names_of``. Raises ``ConfigError``."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, material)
    context.check_hostname = False
    return context


def _context(protocol: int, material: TlsMaterial) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    files = material.files
    try:
        context.load_verify_locations(cadata=material.ca.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError([f"{files.ca}: cannot be used: {_reason(error)}"]) from error
    if material.chain is not None and material.key is not None:
        try:
            _load_chain(context, material.chain, material.key)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError([f"{files.key}: does not match the certificate in {files.cert}"]) from error
            raise ConfigError([f"{files.cert} and {files.key}: cannot be used: {_reason(error)}"]) from error
    return context


def _load_chain(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    """Load from memory: Python wants a file, so it gets one that is never on a disk."""
    file = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(chain + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{file}", password=_no_password)
    finally:
        os.close(file)


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted")


# --- names -----------------------------------------------------------------------------------------------------------


def names_of(certificate: Mapping[str, object] | None) -> tuple[str, ...]:
    """The DNS names of a certificate in ``ssl``'s form: they alone identify a member."""
    pairs = (certificate or {}).get("subjectAltName", ())
    return tuple(pair[1] for pair in pairs if pair[0] == "DNS") if isinstance(pairs, tuple) else ()


def check_name(names: Sequence[str], node_id: str, whose: str) -> None:
    """Raise ``TlsError`` unless the certificate belongs to ``node_id``, exactly: a wildcard would match any node."""
    if node_id not in names:
        held = ", ".join(names) or "no DNS name"
        raise TlsError(
            f"the certificate {whose} does not belong to {node_id}: its subjectAltName has {held}, but must have "
            f"DNS:{node_id} ({_MAKE_CERTIFICATES})"
        )


def check_one_of(names: Sequence[str], wanted: Iterable[str], whose: str) -> None:
    """Raise ``TlsError`` unless the certificate has one of the names that are ``wanted``, exactly."""
    wanted = sorted(wanted)
    if not set(names).intersection(wanted):
        held = ", ".join(names) or "no DNS name"
        raise TlsError(
            f"the certificate {whose} has a subjectAltName with {held}, but must have DNS:{' or DNS:'.join(wanted)} "
            f"({_MAKE_CERTIFICATES})"
        )


# --- usability -------------------------------------------------------------------------------------------------------


def rehearse(material: TlsMaterial) -> Mapping[str, object]:
    """Let our certificate talk to itself, as between two members; returns it as the other side sees it.

    Detects before any peer does that it has expired, is not signed by the CA we trust, or may not be used on one of the
    two sides. Raises ``TlsError``.
    """
    try:
        return _let_talk(server_context(material), client_context(material))
    except ssl.SSLError as error:
        raise TlsError(f"{material.files.cert}: cannot be used with {material.files.ca}: {_reason(error)}") from error


def client_problem(material: TlsMaterial) -> str:
    """The reason why a server that trusts the same CA would reject our certificate; empty if there is none."""
    client = client_context(material)
    client.verify_mode = ssl.CERT_NONE  # this checks the other direction, and no peer is involved
    try:
        _let_talk(server_context(material), client)
    except ssl.SSLError as error:
        return _reason(error)
    return ""


def _let_talk(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, object]:
    """A handshake between two contexts of ours; returns the server's certificate as the client sees it."""
    us, them = TlsStream(server, server_side=True), TlsStream(client)
    to_them = b""
    for _ in range(_REHEARSAL_ROUNDS):
        to_us = them.shake_hands(to_them)
        to_them = us.shake_hands(to_us)
        if us.agreed and them.agreed:
            return them.certificate
    raise ssl.SSLError("the handshake timed out")


def expires_at(certificate: Mapping[str, object]) -> datetime:
    """When a certificate in ``ssl``'s form expires."""
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)


# --- explanations ----------------------------------------------------------------------------------------------------


def explain(error: OSError, whom: str) -> str:
    """Why TLS with ``whom`` failed, and which side has to act."""
    if not isinstance(error, ssl.SSLError):
        return f"{whom} closed the connection during the TLS handshake: does it use TLS and trust our certificate?"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {whom} is not trusted: {_reason(error)}"
    return _explain_reason(error.reason or str(error), whom)


def _explain_reason(reason: str, whom: str) -> str:
    """The same for OpenSSL's name of an error."""
    if reason in _NO_TLS:
        return f"{whom} does not use TLS, but we do: configure certificates on both sides, or on neither"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"{whom} sent no certificate"
    for alert, meaning in _ALERTS.items():
        if "ALERT" in reason and reason.endswith(alert):
            return f"{whom}: {meaning}"
    return f"no TLS with {whom}: {reason.lower().replace('_', ' ')}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).lower().replace("_", " ")
    return str(error) or type(error).__name__


class ContextSource:
    """Makes the TLS context of each new connection, anew if the files have changed; it checks the servers' names."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watch = FileWatch(files.paths)
        self._watch.changed()
        self._context = self._read()

    def __call__(self) -> ssl.SSLContext:
        if self._watch.changed():
            try:
                self._context = self._read()
            except ConfigError:  # half-written, perhaps: the old ones until the next connection
                self._watch.again()
        return self._context

    def _read(self) -> ssl.SSLContext:
        context = client_context(read(self._files))
        context.check_hostname = True
        return context


class FileWatch:
    """Detects whether files have changed since they were last read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: _Stamp = ()

    def changed(self) -> bool:
        """Whether they have since the last call, which the first call affirms."""
        before, self._seen = self._seen, tuple(map(_stamp, self._paths))
        return before != self._seen

    def again(self) -> None:
        """Report them as changed next time, too."""
        self._seen = ()

    @property
    def age_s(self) -> float:
        """How long ago the youngest file was written, by the wall clock."""
        written = [one[1] for one in self._seen if one is not None]
        return abs(time.time() - max(written) / 1e9) if written else 0.0


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
