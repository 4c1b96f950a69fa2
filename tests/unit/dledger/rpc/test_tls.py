"""Certificates in one process: what is taken into use, what is not, and what is said of it."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from dledger.client.shared import TlsFiles
from dledger.config import ClientAuth, Member, SecurityConfig, ServerConfig
from dledger.core.messages import Envelope, HeartbeatRequest, PushCommit, TakeLeadership, VoteRequest
from dledger.errors import ConfigError, TlsError
from dledger.rpc import tls
from dledger.rpc.peers import port
from dledger.rpc.peers.frames import FrameKind, Purpose
from dledger.rpc.peers.transport import PeerTransport
from dledger.rpc.tls import FileWatch, TlsStream
from dledger.rpc.tls_keeper import TlsKeeper
from dledger.types import NO_ENTRY, LogIndex, NodeId, Term
from dledger_cli import certs
from dledger_cli.local.group import free_ports
from tests.support.certificates import expire, files, reissue
from tests.support.peer_wire import PeerWire, handshake_frame
from tests.support.receiver import RecordingReceiver
from tests.support.waiting import wait_until

N0, N1, N2 = (NodeId(f"n{number}") for number in range(3))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A CA, two nodes, a client."""
    directory = tmp_path / "certs"
    certs.make_authority(directory)
    for node in ("n0", "n1"):
        certs.make_node(directory, node)
    certs.make_client(directory, "billing")
    return directory


def security_of(here: Path, name: str, **others: object) -> SecurityConfig:
    found = files(here, name)
    config = SecurityConfig(tls_cert_path=found.cert, tls_key_path=found.key, tls_trust_cert_path=found.ca)
    return replace(config, **others)  # type: ignore[arg-type]  # the caller's


def old(path: Path) -> None:
    """Written long ago: what is wrong with it is no moment in a change."""
    os.utime(path, (1_600_000_000, 1_600_000_000 + len(path.read_bytes())))


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_which_file_is_told(here: Path, tmp_path: Path) -> None:
    """Before anything is used."""
    good = files(here, "n0")
    assert good.cert is not None
    assert good.key is not None
    garbage, locked = tmp_path / "garbage.pem", tmp_path / "locked.key"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n")
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nxx\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for bad, words in (
        (replace(good, ca=tmp_path / "none"), "none: cannot be read: No such file"),
        (replace(good, ca=good.key), "contains no PEM certificate"),
        (replace(good, ca=garbage), "garbage.pem: cannot be used"),
        (replace(good, cert=garbage), "garbage.pem and .*n0.key: cannot be used"),
        (replace(good, key=good.cert), "contains no PEM private key"),
        (replace(good, key=locked), "the key is encrypted"),
        (replace(good, key=files(here, "n1").key), "n1.key: does not match the certificate in .*n0.crt"),
    ):
        with pytest.raises(ConfigError, match=words):
            tls.read(bad)


def test_a_certificate_needs_its_key(here: Path) -> None:
    """And the other way round."""
    good = files(here, "n0")
    for cert, key in ((good.cert, None), (None, good.key)):
        with pytest.raises(ConfigError, match="given together"):
            TlsFiles(good.ca, cert, key)


@pytest.mark.parametrize("names", [(), ("n1",), ("*",), ("n0.example",), ("N0",)])
def test_a_name_is_exact(names: tuple[str, ...]) -> None:
    """Who is almost n0 is somebody else."""
    with pytest.raises(TlsError, match="does not belong to n0"):
        tls.check_name(names, "n0", "of a test")


def test_only_dns_names_are_names_of_nodes() -> None:
    """An address, a URI or a common name that reads like one is none."""
    certificate = {
        "subject": ((("commonName", "n0"),),),
        "subjectAltName": (("DNS", "n1"), ("URI", "n0"), ("IP Address", "10.0.0.1"), ("email", "n0")),
    }

    assert tls.names_of(certificate) == ("n1",)
    assert tls.names_of({}) == tls.names_of(None) == ()


# --- the stream ------------------------------------------------------------------------------------------------------


def connected(here: Path) -> tuple[TlsStream, TlsStream]:
    """A server and a client that have shaken hands, in memory."""
    server = TlsStream(tls.server_context(tls.read(files(here, "n0"))), server_side=True)
    client = TlsStream(tls.client_context(tls.read(files(here, "n1"))))
    reply = b""
    while not (server.agreed and client.agreed):
        reply = server.shake_hands(client.shake_hands(reply))
    return server, client


def test_what_is_sealed_is_read_however_it_is_cut(here: Path) -> None:
    """TCP keeps no boundaries; a stream keeps the order."""
    server, client = connected(here)
    said = os.urandom(100_000)
    sealed = client.seal(said[:1]) + client.seal(said[1:70_000]) + client.seal(memoryview(said)[70_000:])

    heard = b""
    for start in range(0, len(sealed), 9_999):
        server.feed(sealed[start : start + 9_999])
        heard += server.read()

    assert heard == said
    assert said[:100] not in sealed
    assert server.version == "TLSv1.3"
    assert tls.names_of(server.certificate)[0] == "n1"


def test_bytes_go_where_there_is_room(here: Path) -> None:
    """As many as fit; the rest stays."""
    server, client = connected(here)
    server.feed(client.seal(b"x" * 40_000 + b"y" * 5))
    room = memoryview(bytearray(40_000))

    assert server.read_into(room) == 40_000
    assert bytes(room) == b"x" * 40_000
    assert server.read() == b"y" * 5
    assert server.read_into(room) == 0


def test_one_may_read_while_others_write(here: Path) -> None:
    """As on a push connection: pushes come in on one thread, answers go out from another."""
    server, client = connected(here)
    pushes = [client.seal(b"p%05d" % number) for number in range(2000)]
    answers: list[bytes] = []
    writer = threading.Thread(target=lambda: answers.extend(server.seal(b"a%05d" % n) for n in range(2000)))

    writer.start()
    heard = b""
    for push in pushes:
        server.feed(push)
        heard += server.read()
    writer.join()

    assert heard == b"".join(b"p%05d" % number for number in range(2000))
    client.feed(b"".join(answers))
    assert client.read() == b"".join(b"a%05d" % number for number in range(2000))


def test_forged_bytes_end_the_stream(here: Path) -> None:
    """A changed bit is no other message."""
    server, client = connected(here)
    sealed = bytearray(client.seal(b"transfer 1"))
    sealed[-1] ^= 1

    server.feed(bytes(sealed))
    with pytest.raises(ssl.SSLError):
        server.read()


def test_old_protocols_are_not_spoken(here: Path) -> None:
    """TLS 1.2 is the least; it is spoken with who has no 1.3."""
    server, client = (make(tls.read(files(here, "n0"))) for make in (tls.server_context, tls.client_context))
    assert server.minimum_version == client.minimum_version == ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    us, them = TlsStream(server, server_side=True), TlsStream(client)
    reply = b""
    while not (us.agreed and them.agreed):
        reply = us.shake_hands(them.shake_hands(reply))

    assert us.version == "TLSv1.2"
    us.feed(them.seal(b"x"))
    assert us.read() == b"x"


# --- the keeper ------------------------------------------------------------------------------------------------------


def keeper_of(here: Path, **others: object) -> TlsKeeper:
    return TlsKeeper(security_of(here, "n0", **others), name="n0", member="n0")


def test_a_changed_pair_is_taken_into_use(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For whoever connects next, with a line that says so; what is unchanged is not read again."""
    caplog.set_level(logging.INFO)
    keeper = keeper_of(here)
    before = keeper.accepting()
    assert keeper.accepting() is before

    certs.renew(here, "n0", days=30, new_key=True)

    assert keeper.accepting() is not before
    assert keeper.version == 1
    assert keeper.expires_at is not None
    assert keeper.expires_at - datetime.now(UTC) < timedelta(days=31)
    assert "n0 switched to its new TLS certificate, valid until" in caplog.text


def test_a_moment_between_two_files_is_not_worth_a_line(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of the two has just been written: the other is on its way. It is looked at again, changed or not."""
    keeper, key = keeper_of(here), here / "n0.key"
    before, good = keeper.accepting(), key.read_bytes()

    key.write_bytes((here / "n1.key").read_bytes())
    assert keeper.accepting() is before
    assert not caplog.records

    for path in here.iterdir():
        old(path)
    keeper.refresh()
    keeper.refresh()
    assert caplog.text.count("keeps its old TLS certificate") == 1
    assert "does not match the certificate" in caplog.text
    key.write_bytes(good)
    assert keeper.accepting() is not before


@pytest.mark.parametrize("what", ["expired", "another's", "a client's", "another CA's", "gone"])
def test_what_peers_would_refuse_is_not_taken(here: Path, tmp_path: Path, what: str) -> None:
    """At the start it is an error, later the old one goes on."""
    keeper = keeper_of(here)
    before = keeper.accepting()
    source, name = here, "n0"
    if what == "expired":
        expire(here, "n0")
    elif what == "gone":
        (here / "n0.key").unlink()
    else:
        source, name = (tmp_path / "other", "n0") if "CA" in what else (here, "n1" if "another" in what else "billing")
        if "CA" in what:
            certs.make_authority(source)
            certs.make_node(source, "n0")
        for suffix in (".crt", ".key"):
            (here / f"n0{suffix}").write_bytes((source / f"{name}{suffix}").read_bytes())

    assert keeper.accepting() is before
    with pytest.raises(ConfigError):
        keeper_of(here)


def test_the_end_is_announced(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, when two weeks are left."""
    now = datetime.now(UTC)
    reissue(here, "n0", begins=now - timedelta(days=1), ends=now + timedelta(days=3))

    keeper = keeper_of(here)
    keeper.refresh()

    assert caplog.text.count("renew it") == 1
    assert f"{now + timedelta(days=3):%Y-%m-%d}" in caplog.text


def test_a_server_without_peers_may_have_a_public_certificate(
    here: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own is of a CA that its clients know, and need not be of the one that it knows; it is told all the same."""
    other = tmp_path / "clients"
    certs.make_authority(other)

    keeper = TlsKeeper(security_of(here, "n0", tls_trust_cert_path=other / "ca.crt"), name="broker", member=None)

    assert keeper.expires_at is None
    assert "clients may reject its TLS certificate" in caplog.text


def test_plaintext_needs_no_keeper(here: Path) -> None:
    """And half of TLS is not plaintext."""
    assert TlsKeeper.of(ServerConfig()) is None
    with pytest.raises(ConfigError, match="set tls_key_path"):
        TlsKeeper.of(ServerConfig(security=security_of(here, "n0", tls_key_path=None)))


def test_a_watch_sees_every_replacement(tmp_path: Path) -> None:
    """Written in place, renamed over, removed, back."""
    path = tmp_path / "x"
    path.write_text("1")
    watch = FileWatch([path])

    assert watch.changed()
    assert not watch.changed()
    path.write_text("22")
    assert watch.changed()
    (tmp_path / "y").write_text("33")
    (tmp_path / "y").rename(path)
    assert watch.changed()
    path.unlink()
    assert watch.changed()
    assert watch.age_s == 0
    assert not watch.changed()


# --- members ---------------------------------------------------------------------------------------------------------


def configs(here: Path, *, secured: tuple[bool, bool] = (True, True)) -> list[ServerConfig]:
    ports = free_ports(2)
    members = tuple(Member(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(ports))
    plain = SecurityConfig()
    return [
        ServerConfig(
            node_id=NodeId(f"n{i}"),
            members=members,
            client_port=0,
            cluster_id="c",
            security=security_of(here, f"n{i}") if tls_on else plain,
        )
        for i, tls_on in enumerate(secured)
    ]


@contextmanager
def transports(
    configs: list[ServerConfig],
) -> Iterator[list[tuple[PeerTransport, RecordingReceiver]]]:
    members = [(PeerTransport(config), RecordingReceiver()) for config in configs]
    try:
        for transport, receiver in members:
            transport.start(receiver)
        yield members
    finally:
        for transport, _ in members:
            transport.close()


def envelope(message: VoteRequest | HeartbeatRequest | TakeLeadership | PushCommit) -> Envelope:
    return Envelope("c", "default", N0, N1, message)


COMMIT = envelope(PushCommit(Term(1), 0, LogIndex(0)))


def test_members_push_over_tls(here: Path) -> None:
    """Large and small, in order."""
    with transports(configs(here)) as ((sending, _), (_, receiver)):
        for _ in range(5):
            sending.send(COMMIT)
        wait_until(lambda: len(receiver.received) == 5, "five pushes")


@pytest.mark.parametrize("secured", [(True, False), (False, True)])
def test_tls_and_plaintext_do_not_mix(here: Path, secured: tuple[bool, bool], caplog: pytest.LogCaptureFixture) -> None:
    """Each side hears why, in words, whichever of them has TLS; nothing is delivered."""
    with transports(configs(here, secured=secured)) as ((sending, _), (_, receiver)):
        sending.send(COMMIT)
        words = (
            "not use TLS: configure certificates on all members" if secured[0] else "accepts only TLS from its peers"
        )
        wait_until(lambda: caplog.text.count(words) >= 2, "both sides say why")

    assert not receiver.received
    assert "n0 does not talk to n1: " in caplog.text


def test_who_answers_at_a_member_s_address_must_be_it(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """n1's certificate is n0's: a wrong address, or somebody who has taken its place."""
    first, second = configs(here)
    imposter = TlsKeeper(security_of(here, "n0"), name="n1", member="n0")
    sending, receiving, receiver = PeerTransport(first), PeerTransport(second, tls_keeper=imposter), RecordingReceiver()
    try:
        receiving.start(receiver)
        sending.start(RecordingReceiver())
        sending.send(COMMIT)
        sending.send(envelope(VoteRequest(Term(1), NO_ENTRY, pre_vote=True, transfer=False)))
        wait_until(lambda: "does not belong to n1" in caplog.text, "a link says so")
        wait_until(lambda: sending.dropped(N1) >= 2, "both messages are dropped")
    finally:
        sending.close()
        receiving.close()

    assert not receiver.received


def test_a_member_speaks_in_its_own_name_only(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With n2's certificate, and key, nobody pushes, asks for votes, beats or hands over as n0."""
    certs.make_node(here, "n2")
    first, second = (replace(one, members=(*one.members, Member(N2, "127.0.0.1", 1))) for one in configs(here))
    imposter = TlsKeeper(security_of(here, "n2"), name="n0", member="n2")
    sending, receiving, receiver = PeerTransport(first, tls_keeper=imposter), PeerTransport(second), RecordingReceiver()
    messages = (
        COMMIT,
        envelope(VoteRequest(Term(1), NO_ENTRY, pre_vote=False, transfer=False)),
        envelope(HeartbeatRequest(Term(1), 1, "")),
        envelope(TakeLeadership(Term(1))),
    )
    try:
        receiving.start(receiver)
        sending.start(RecordingReceiver())
        for number, message in enumerate(messages, 1):
            sending.send(message)
            wait_until(lambda number=number: sending.dropped(N1) >= number, "it is dropped")  # type: ignore[misc]  # the default argument
    finally:
        sending.close()
        receiving.close()

    assert "does not belong to n0" in caplog.text
    assert not receiver.received
    assert not receiver.requested


def test_a_client_s_certificate_opens_no_connection_between_members(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is signed by the same CA, but is not that of the member that its owner claims to be."""
    context = tls.client_context(tls.read(files(here, "billing")))
    both = configs(here)
    with (
        transports(both) as (_, (receiving, receiver)),
        PeerWire(("127.0.0.1", receiving.port), context) as wire,
    ):
        wire.link.sendall(handshake_frame(both[1], N0, Purpose.PUSH))
        ((kind, refusal),) = wire.rest()

    assert kind is FrameKind.REFUSAL
    assert "does not belong to n0" in bytes(refusal).decode()
    assert "does not belong to n0" in caplog.text
    assert not receiver.received


def test_new_certificates_are_shown_on_new_connections(here: Path) -> None:
    """While the node runs; connections that are open go on with the old ones."""
    both = configs(here)
    context = tls.client_context(tls.read(files(here, "n0")))
    with transports(both[1:]) as ((receiving, _),):  # without n0, whose own connection would end this test's
        address = ("127.0.0.1", receiving.port)
        with PeerWire(address, context).begin(both[1], N0, Purpose.CONTROL) as older:
            serials = [_serial(older)]
            certs.make_node(here, "n1", force=True)
            with PeerWire(address, context) as newer:
                serials.append(_serial(newer))
            older.send(FrameKind.HEARTBEAT, HeartbeatRequest(Term(1), 1))
            frame = older.frame()

    assert frame is not None
    assert frame[0] is FrameKind.HEARTBEAT_ANSWER
    assert len(set(serials)) == 2


def _serial(wire: PeerWire) -> object:
    assert isinstance(wire.link, ssl.SSLSocket)
    return (wire.link.getpeercert() or {}).get("serialNumber")


def test_a_handshake_that_trickles_in_is_ended(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for all of it: a byte now and then does not buy more. Nor does TLS done and nothing said."""
    monkeypatch.setattr(port, "HANDSHAKE_TIMEOUT_S", 0.3)
    both = configs(here)
    context = tls.client_context(tls.read(files(here, "n0")))
    with transports(both) as (_, (receiving, _)):
        address = ("127.0.0.1", receiving.port)
        with closing(socket.create_connection(address, timeout=60)) as slow:
            trickle = threading.Thread(target=_trickle, args=(slow, b"\x16\x03\x01\x02\x00" + bytes(500)))
            trickle.start()
            assert _heard_end(slow)
            trickle.join()
        with (
            closing(socket.create_connection(address, timeout=60)) as silent,
            context.wrap_socket(silent) as sealed,
        ):
            assert _heard_end(sealed)


def test_a_plaintext_handshake_that_trickles_in_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without TLS."""
    monkeypatch.setattr(port, "HANDSHAKE_TIMEOUT_S", 0.3)
    both = configs(Path(), secured=(False, False))
    with (
        transports(both) as (_, (receiving, _)),
        closing(socket.create_connection(("127.0.0.1", receiving.port), timeout=60)) as slow,
    ):
        slow.sendall(b"\x01\x00\x00\xff\x00")
        trickle = threading.Thread(target=_trickle, args=(slow, bytes(500)))
        trickle.start()
        assert _heard_end(slow)
        trickle.join()


def _trickle(link: socket.socket, data: bytes) -> None:
    never = threading.Event()
    try:
        for byte in data:
            link.sendall(bytes([byte]))
            never.wait(0.1)
    except OSError:  # hung up on, as it should be
        return


def _heard_end(link: socket.socket) -> bool:
    """Whether the other side hangs up before the socket's own timeout."""
    try:
        while link.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


# --- clients ---------------------------------------------------------------------------------------------------------


@contextmanager
def grpc_server(here: Path, *, client_auth: ClientAuth = ClientAuth.REQUIRE) -> Iterator[str]:
    """A server with n0's certificate and no service."""
    keeper = keeper_of(here, tls_client_auth=client_auth)
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_secure_port("127.0.0.1:0", keeper.client_server_credentials())
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
