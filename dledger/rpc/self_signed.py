"""A certificate that nobody vouches for, made at the start: for clients that use TLS and believe any certificate."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID_FOR: Final = timedelta(days=3650)
"""It lives as long as the process; a new one costs a restart."""
_CLOCKS_DIFFER_BY: Final = timedelta(days=1)


def pair(host: str, now: datetime) -> tuple[bytes, bytes]:
    """A key and its certificate in PEM, for this host, which may be an address, and ``localhost``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "self-signed")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_BY)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(
            x509.SubjectAlternativeName([_general(one) for one in dict.fromkeys((host, "localhost"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return pem, made.public_bytes(serialization.Encoding.PEM)


def credentials(host: str) -> grpc.ServerCredentials:
    """For a server that asks its clients for no certificate."""
    return grpc.ssl_server_credentials([pair(host, datetime.now(UTC))])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return x509.DNSName(host)
