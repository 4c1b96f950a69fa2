"""``dledger certs``: what the files hold, that they verify, and that nothing is overwritten unasked."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store

from dledger.errors import ConfigError
from dledger_cli import certs
from dledger_cli.cli import main


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    certs.make_authority(tmp_path / "certs")
    return tmp_path / "certs"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, ["certs", *words])


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_node_is_its_id_and_its_hosts(directory: Path) -> None:
    """Peers look for the id, clients for what they dial; it is good for both ends of a connection (mutual TLS)."""
    pair = certs.make_node(directory, "n0", ["db0.internal", "10.0.0.1", "[2001:db8::1]", "n0"])

    facts = certs.look_at(pair.cert)
    assert facts.names == ("DNS:n0", "DNS:db0.internal", "IP:10.0.0.1", "IP:2001:db8::1")
    assert facts.use == "server and client"
    assert facts.validity == "valid, 365 days left"


def test_a_node_without_hosts_is_for_this_machine(directory: Path) -> None:
    """A first group runs on localhost."""
    assert certs.look_at(certs.make_node(directory, "n0").cert).names == (
        "DNS:n0",
        "DNS:localhost",
        "IP:127.0.0.1",
        "IP:::1",
    )


def test_a_client_can_be_taken_for_no_node(directory: Path) -> None:
    """It has no name of a host, and must not serve, even if it is called like a node."""
    pair = certs.make_client(directory, "n7")

    facts = certs.look_at(pair.cert)
    assert facts.names == ("URI:urn:dledger:client:n7",)
    assert facts.use == "client"


def test_certificates_verify_by_the_strict_rules_of_the_web(directory: Path) -> None:
    """Key usage, extended key usage, basic constraints, names and lifetimes are as RFC 5280 and CA/B want them."""
    node = certificate(certs.make_node(directory, "n0", ["db0.internal"], days=30).cert)
    client = certificate(certs.make_client(directory, "billing", days=30).cert)
    policy = PolicyBuilder().store(Store([certificate(directory / "ca.crt")]))

    policy.build_server_verifier(x509.DNSName("db0.internal")).verify(node, [])
    policy.build_client_verifier().verify(node, [])
    policy.build_client_verifier().verify(client, [])
    for one in (node, client):
        usage = one.extensions.get_extension_for_class(x509.KeyUsage)
        assert usage.critical
        assert usage.value.digital_signature
        assert not usage.value.key_cert_sign
        assert not one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        key = one.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
    allowed = client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(allowed) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_the_authority_signs_certificates_and_nothing_under_it_does(directory: Path) -> None:
    """Whoever steals a node's key can make no certificates."""
    authority = certificate(directory / "ca.crt")

    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage).value
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    assert authority.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3600)


def test_keys_are_readable_by_their_owner_only(directory: Path) -> None:
    """From the first moment on, and no half-written file is left."""
    certs.make_node(directory, "n0")

    for path in directory.iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o600 if path.suffix == ".key" else 0o644), path
    assert {path.name for path in directory.iterdir()} == {"ca.crt", "ca.key", "n0.crt", "n0.key"}


def test_a_failed_write_leaves_what_was_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing, and nothing lies around."""
    pair = certs.make_node(directory, "n0")
    before = {path: path.read_bytes() for path in directory.iterdir()}

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        certs.make_node(directory, "n0", force=True)

    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    assert pair.cert in before


def test_nothing_is_replaced_unasked(directory: Path) -> None:
    """A new CA would make every certificate worthless; a new key, every copy of the old."""
    certs.make_node(directory, "n0")
    certs.make_client(directory, "billing")
    before = {path: path.read_bytes() for path in directory.iterdir()}

    attempts: tuple[Callable[[], object], ...] = (
        lambda: certs.make_authority(directory),
        lambda: certs.make_node(directory, "n0"),
        lambda: certs.make_client(directory, "n0"),
        lambda: certs.make_client(directory, "billing"),
    )
    for attempt in attempts:
        with pytest.raises(ConfigError, match="--force"):
            attempt()
    assert {path: path.read_bytes() for path in directory.iterdir()} == before

    certs.make_node(directory, "n0", force=True)
    assert (directory / "n0.key").read_bytes() != before[directory / "n0.key"]


@pytest.mark.parametrize("name", ["", "../n0", "a/b", ".hidden", "ca", "n 0", "n0\n", "x" * 64])
def test_names_lead_nowhere_else(directory: Path, name: str) -> None:
    """A name becomes a file name; the CA's own is taken."""
    for make in (certs.make_node, certs.make_client):
        with pytest.raises(ConfigError, match="invalid certificate name"):
            make(directory, name)


@pytest.mark.parametrize("host", ["10.0.0.1:20911", "a b", "-x", "http://n0", ""])
def test_hosts_are_hosts(directory: Path, host: str) -> None:
    """An address with a port in a certificate fits nothing, and nobody would see why."""
    with pytest.raises(ConfigError, match="invalid host"):
        certs.make_node(directory, "n0", [host])


def test_renewing_keeps_names_and_key(directory: Path) -> None:
    """Only one file changes, so no moment exists in which certificate and key do not fit."""
    pair = certs.make_node(directory, "n0", ["db0"], days=1)
    before, key = certs.look_at(pair.cert), pair.key.read_bytes()

    certs.renew(directory, "n0", days=90)

    after = certs.look_at(pair.cert)
    assert (after.names, after.use, after.subject) == (before.names, before.use, before.subject)
    assert after.serial != before.serial
    assert after.ends - before.ends > timedelta(days=88)
    assert pair.key.read_bytes() == key


def test_renewing_can_replace_the_key(directory: Path) -> None:
    """When it was seen by others."""
    pair = certs.make_client(directory, "billing")
    key = pair.key.read_bytes()

    certs.renew(directory, "billing", new_key=True)

    assert pair.key.read_bytes() != key
    assert certs.look_at(pair.cert).use == "client"
    PolicyBuilder().store(Store([certificate(directory / "ca.crt")])).build_client_verifier().verify(
        certificate(pair.cert), []
    )


def test_what_cannot_be_done_is_told(directory: Path, tmp_path: Path) -> None:
    """Each with a sentence that says what to do, or what is wrong with which file."""
    (directory / "bad.crt").write_text("garbage")
    (directory / "bad.key").write_text("garbage")
    attempts: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: certs.make_node(tmp_path / "none", "n0"), "has no CA yet: create one with `dledger certs init"),
        (lambda: certs.make_node(directory, "n0", days=4000), "in less than 4000 days"),
        (lambda: certs.make_node(directory, "n0", days=0), "0 days"),
        (lambda: certs.renew(directory, "absent"), "absent.crt: cannot be read"),
        (lambda: certs.renew(directory, "bad"), "contains no PEM certificate"),
        (lambda: certs.look_at(directory / "bad.crt"), "contains no PEM certificate"),
        (lambda: certs.look_at(directory / "ca.key"), "contains no PEM certificate"),
    )
    for attempt, words in attempts:
        with pytest.raises(ConfigError, match=words):
            attempt()


def test_the_commands_make_a_group_s_files(run: Callable[..., Result], tmp_path: Path) -> None:
    """As the help shows it."""
    for words in (
        ["init"],
        ["node", "n0", "--host", "10.0.0.1"],
        ["client", "billing"],
        ["renew", "n0", "billing"],
    ):
        shown = run(*words)
        assert shown.exit_code == 0, shown.output
    shown = run("show", "certs/n0.crt", "certs/ca.crt")

    assert "certs/n0.crt: valid, 365 days left" in shown.output
    assert "DNS:n0, IP:10.0.0.1" in shown.output
    assert "certificate authority" in shown.output
    as_json = json.loads(run("show", "certs/billing.crt", "--json").output)
    assert as_json["names"] == ["URI:urn:dledger:client:billing"]
    assert {path.name for path in (tmp_path / "certs").iterdir()} >= {"n0.key", "billing.key"}


def test_a_directory_stands_for_its_certificates(run: Callable[..., Result], tmp_path: Path) -> None:
    """Not for keys, which nobody wants to see; one without any is refused with what to give."""
    for words in (["init"], ["node", "n0"]):
        assert run(*words).exit_code == 0
    shown = run("show", "certs")
    assert shown.exit_code == 0, shown.output
    assert [one for one in shown.output.splitlines() if not one.startswith(" ")] == [
        f"certs/{name}.crt: valid, {days} days left" for name, days in (("ca", 3650), ("n0", 365))
    ]
    as_json = [json.loads(line)["file"] for line in run("show", "certs", "certs/n0.crt", "--json").output.splitlines()]
    assert as_json == ["certs/ca.crt", "certs/n0.crt", "certs/n0.crt"]

    (tmp_path / "empty").mkdir()
    refused = run("show", "empty")
    assert (refused.exit_code, "empty: contains no .crt file: give the certificate's file" in refused.output) == (
        2,
        True,
    )


def test_a_second_run_of_a_script_changes_nothing(run: Callable[..., Result], tmp_path: Path) -> None:
    """``--if-missing`` is for start scripts; without it, what is there is an error with exit code 2."""
    script = (["init", "d"], ["node", "n0", "--dir", "d"], ["client", "c", "--dir", "d"])
    for words in script:
        assert run(*words, "--if-missing").exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "d").iterdir()}

    for words in script:
        assert run(*words, "--if-missing").exit_code == 0
        refused = run(*words)
        assert refused.exit_code == 2
        assert "--force" in refused.output

    assert {path: path.read_bytes() for path in (tmp_path / "d").iterdir()} == before


@pytest.mark.parametrize("left", ["key", "crt"])
def test_half_a_pair_is_not_taken_for_what_is_wanted(run: Callable[..., Result], tmp_path: Path, left: str) -> None:
    """A start script that was ended between the two files hears of it, instead of a node later."""
    certs.make_authority(tmp_path)
    certs.make_node(tmp_path, "n0")
    (tmp_path / f"n0.{'crt' if left == 'key' else 'key'}").unlink()

    ended = run("node", "n0", "--dir", str(tmp_path), "--if-missing")

    assert ended.exit_code == 2
    assert "already exists: pass --force" in ended.output
