"""A certificate authority in a directory, for development and for groups without one.

A node's certificate contains its id and the names and addresses that clients use, and is valid for both ends of a
connection. A client's names no host: it is valid only for the calling end, so it cannot impersonate a node.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dledger.errors import ConfigError
from dledger.values import without_brackets

CA_DAYS: Final = 3650
LEAF_DAYS: Final = 365
CA_NAME: Final = "ca"
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""Hosts in a node's certificate if none are given."""
CLIENT_URI: Final = "urn:dledger:client:"
_CLOCKS_DIFFER_BY: Final = timedelta(minutes=5)
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_HOST: Final = re.compile(r"[A-Za-z0-9_*]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")

_NODE_USAGE: Final = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_CLIENT_USAGE: Final = (ExtendedKeyUsageOID.CLIENT_AUTH,)
_USAGE_WORDS: Final = {
    ExtendedKeyUsageOID.SERVER_AUTH: "server",
    ExtendedKeyUsageOID.CLIENT_AUTH: "client",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path

    @classmethod
    def named(cls, directory: Path, name: str) -> Pair:
        """The paths of a name's certificate and key."""
        return cls(directory / f"{name}.crt", directory / f"{name}.key")

    @property
    def exists(self) -> bool:
        """Whether either file exists."""
        return self.cert.exists() or self.key.exists()

    @property
    def is_whole(self) -> bool:
        """Whether both files exist; a process killed between writing them leaves a key alone."""
        return self.cert.exists() and self.key.exists()


@dataclass(frozen=True, slots=True)
class CertificateContents:
    """A certificate's contents, for display."""

    subject: str
    issuer: str
    names: tuple[str, ...]
    use: str
    begins: datetime
    ends: datetime
    serial: str
    fingerprint: str

    @property
    def validity(self) -> str:
        """Whether it is valid now, in words."""
        now = datetime.now(UTC)
        if now < self.begins:
            return "not valid yet"
        return "EXPIRED" if now > self.ends else f"valid, {(self.ends - now + _CLOCKS_DIFFER_BY).days} days left"


def make_authority(directory: Path, *, days: int = CA_DAYS, force: bool = False) -> Pair:
    """Create a CA. Raises ``ConfigError`` if there is one, whose certificates would become worthless."""
    pair = Pair.named(directory, CA_NAME)
    _refuse_to_replace(pair, force=force)
    key = _new_key()
    name = _common_name(f"dledger CA {secrets.token_hex(3)}")  # two CAs of the same name would be confused
    builder = (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    _write_pair(pair, key, builder.sign(key, hashes.SHA256()))
    return pair


def make_node(
    directory: Path, node_id: str, hosts: Sequence[str] = (), *, days: int = LEAF_DAYS, force: bool = False
) -> Pair:
    """Create a certificate for a node, valid for its id and for ``hosts`` (names or addresses)."""
    pair = _pair_for(directory, node_id, force=force)
    names = [x509.DNSName(node_id), *(_host_name(host) for host in hosts or LOCAL_HOSTS)]
    key = _new_key()
    _write_pair(pair, key, _sign_leaf(directory, key, node_id, list(dict.fromkeys(names)), _NODE_USAGE, days))
    return pair


def make_client(directory: Path, name: str, *, days: int = LEAF_DAYS, force: bool = False) -> Pair:
    """Create a certificate for a client."""
    pair = _pair_for(directory, name, force=force)
    key = _new_key()
    uri = x509.UniformResourceIdentifier(f"{CLIENT_URI}{name}")
    _write_pair(pair, key, _sign_leaf(directory, key, name, [uri], _CLIENT_USAGE, days))
    return pair


def renew(directory: Path, name: str, *, days: int = LEAF_DAYS, new_key: bool = False) -> Pair:
    """Issue the same certificate with a new lifetime: for the same key, so that one file changes atomically, or a new
    one.
    """
    pair = Pair.named(directory, _checked_name(name))
    old = _read_certificate(pair.cert)
    key = _new_key() if new_key else _read_key(pair.key)
    try:
        names = list(old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        usages = tuple(old.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound as error:
        raise ConfigError([f"{pair.cert}: not the certificate of a node or client"]) from error
    common_name = str(old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    certificate = _sign_leaf(directory, key, common_name, names, usages, days)
    if new_key:
        _write_pair(pair, key, certificate)
    else:
        _write(pair.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return pair


def look_at(path: Path) -> CertificateContents:
    """The contents of the first certificate in a file. Raises ``ConfigError``."""
    certificate = _read_certificate(path)
    names: tuple[str, ...] = ()
    usages: list[str] = []
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            names = tuple(_name_text(one) for one in extension.value)
        elif isinstance(extension.value, x509.ExtendedKeyUsage):
            usages = [_USAGE_WORDS.get(one, one.dotted_string) for one in extension.value]
        elif isinstance(extension.value, x509.BasicConstraints) and extension.value.ca:
            usages = ["certificate authority"]
    return CertificateContents(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        names=names,
        use=" and ".join(usages) or "anything",
        begins=certificate.not_valid_before_utc,
        ends=certificate.not_valid_after_utc,
        serial=f"{certificate.serial_number:x}",
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


# --- certificates ----------------------------------------------------------------------------------------------------


def _sign_leaf(
    directory: Path,
    key: ec.EllipticCurvePrivateKey,
    common_name: str,
    names: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    days: int,
) -> x509.Certificate:
    authority = Pair.named(directory, CA_NAME)
    if not authority.exists:
        raise ConfigError([f"{directory} has no CA yet: create one with `dledger certs init {directory}`"])
    ca, ca_key = _read_certificate(authority.cert), _read_key(authority.key)
    ends = datetime.now(UTC) + timedelta(days=days)
    if ends > ca.not_valid_after_utc:
        raise ConfigError(
            [f"the CA {authority.cert} expires on {ca.not_valid_after_utc:%Y-%m-%d}, in less than {days} days"]
        )
    builder = (
        _builder(_common_name(common_name), ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    if days <= 0:
        raise ConfigError([f"invalid lifetime of {days} days: use a positive number"])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_BY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(without_brackets(host)))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ConfigError([f"invalid host {host!r}: use a host name or address, without a port"])
    return x509.DNSName(host)


def _name_text(name: x509.GeneralName) -> str:
    match name:
        case x509.DNSName():
            return f"DNS:{name.value}"
        case x509.IPAddress():
            return f"IP:{name.value}"
        case x509.UniformResourceIdentifier():
            return f"URI:{name.value}"
        case _:
            return str(name.value)


# --- files -----------------------------------------------------------------------------------------------------------


def _pair_for(directory: Path, name: str, *, force: bool) -> Pair:
    pair = Pair.named(directory, _checked_name(name))
    _refuse_to_replace(pair, force=force)
    return pair


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == CA_NAME:
        raise ConfigError([f"invalid certificate name {name!r}: use letters, digits, _ - and . (not {CA_NAME})"])
    return name


def _refuse_to_replace(pair: Pair, *, force: bool) -> None:
    if pair.exists and not force:
        raise ConfigError([f"{pair.cert} or its key already exists: pass --force to replace both"])


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise ConfigError([f"{path}: contains no PEM certificate"]) from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError([f"{path}: contains no PEM key, or one with a password"]) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError([f"{path}: not the kind of key that `dledger certs` creates"])
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error


def _write_pair(pair: Pair, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    encoding = serialization.Encoding.PEM
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(pair.key, secret, 0o600)
    _write(pair.cert, certificate.public_bytes(encoding), 0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file atomically: concurrent readers see the old file, and a key is never readable by others."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # readable by us only
        try:
            with open(handle, "wb") as out:
                out.write(data)
                os.fchmod(out.fileno(), mode)
                out.flush()
                os.fsync(out.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from error
