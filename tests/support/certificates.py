"""Certificates that nobody should accept, made from ones that everybody does, and a server that takes none."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dledger.client.shared import TlsFiles
from dledger_cli.certs import Pair


def files(directory: Path, name: str, *, ca: Path | None = None) -> TlsFiles:
    """The files of a certificate that ``dledger certs`` made."""
    pair = Pair.named(directory, name)
    return TlsFiles(ca or directory / "ca.crt", pair.cert, pair.key)


def expire(directory: Path, name: str) -> None:
    """The same certificate, but that it ended an hour ago."""
    now = datetime.now(UTC)
    reissue(directory, name, begins=now - timedelta(days=2), ends=now - timedelta(hours=1))


def reissue(directory: Path, name: str, *, begins: datetime, ends: datetime) -> None:
    """The same certificate with another lifetime, for the same key."""
    pair, ca = Pair.named(directory, name), Pair.named(directory, "ca")
    old = x509.load_pem_x509_certificate(pair.cert.read_bytes())
    ca_key = serialization.load_pem_private_key(ca.key.read_bytes(), password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = old.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    pair.cert.write_bytes(builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@asynccontextmanager
async def resetting_server() -> AsyncIterator[str]:
    """Address of a server that resets each connection after its first bytes.

    So it looks to a client whose certificate is refused while it still writes: the reset overtakes the alert.
    """

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        on, seconds = 1, 0
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, seconds))
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
