"""TLS between real processes: who has no business is refused and hears why, and the group does not even notice."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from dledger.client import ClientSecurity, DLedgerClient, TlsFiles
from dledger.errors import ConfigError, DLedgerError, TlsError, UnavailableError
from dledger.rpc import tls
from dledger.rpc.peers.frames import Frame, FrameKind, Purpose
from dledger.types import NodeId
from dledger_cli import certs
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import HOST
from rocketstore.client import Admin
from rocketstore.message.message import Message
from tests.integration.harness import N0, N1, STEADY, Group, like_the_members, undisturbed
from tests.support.certificates import expire, files
from tests.support.grpc_client import channel_credentials
from tests.support.peer_wire import PeerWire, handshake_frame
from tests.support.waiting import wait_until


@pytest.fixture
def secured(make_group: Callable[..., Group]) -> Group:
    """Three nodes that speak TLS and have a leader."""
    made = make_group(tls=True, settings=STEADY)
    made.start_all()
    made.leader()
    return made


def certs_of(group: Group) -> Path:
    """Where the group's certificates are."""
    assert group.tls is not None
    return group.tls.directory


# --- clients ---------------------------------------------------------------------------------------------------------


def refusal(group: Group, security: ClientSecurity | None, words: str) -> DLedgerError:
    """What a client with these credentials, which can never append, hears once it is told these words.

    Its error is the last word of several attempts, which on a busy machine may be that nobody answered in time.
    """
    heard: list[DLedgerError] = []

    def is_told() -> bool:
        with closing(DLedgerClient(group.addresses, group=group.name, timeout_s=5, security=security)) as client:
            with pytest.raises(DLedgerError) as raised:
                client.append(b"not mine")
            with pytest.raises(DLedgerError):
                client.metadata(timeout_s=2)
        heard.append(raised.value)
        return re.search(words, str(raised.value)) is not None

    wait_until(is_told, f"a client hears {words!r}")
    return heard[-1]


def test_clients_without_the_right_certificate_are_refused(secured: Group, tmp_path: Path) -> None:
    """Each hears in words what is wrong: nothing was appended, and the group goes on in its term."""
    here, other = certs_of(secured), tmp_path / "other"
    certs.make_authority(other)
    certs.make_client(other, "stranger")
    certs.make_client(here, "late")
    expire(here, "late")
    ca = here / "ca.crt"
    cases = {
        "plaintext": (None, "accepts only TLS: give the CA.*--tls-ca"),
        "no certificate": (ClientSecurity(TlsFiles(ca)), "requires a client certificate: give one .--tls-cert"),
        "of a CA that they do not know": (
            ClientSecurity(files(other, "stranger", ca=ca)),
            "stranger.crt: unable to get local issuer",
        ),
        "of a CA that we do not know": (
            ClientSecurity(files(other, "stranger")),
            "is not trusted: self-signed certificate",
        ),
        "expired": (ClientSecurity(files(here, "late")), "late.crt: certificate has expired"),
    }

    with undisturbed(secured):
        heard = {name: refusal(secured, security, words) for name, (security, words) in cases.items()}

    for name, error in heard.items():
        assert isinstance(error, UnavailableError if name == "no certificate" else TlsError)
        assert error.outcome == "not_applied"


def test_a_certificate_must_name_what_is_dialled(secured: Group) -> None:
    """Whoever answers at an address must be who is expected there."""
    for node in secured.nodes:
        certs.make_node(certs_of(secured), node, ["elsewhere.example"], force=True)
    assert isinstance(refusal(secured, secured.security, "is not trusted: IP address mismatch"), TlsError)


def test_without_client_certificates_only_peers_need_one(make_group: Callable[..., Group]) -> None:
    """``tls_client_auth=none``: clients verify the servers, and are who they like."""
    group = make_group(tls=True, settings={"tls_client_auth": "none"})
    group.start_all()
    group.leader()

    security = ClientSecurity(TlsFiles(certs_of(group) / "ca.crt"))
    with closing(DLedgerClient(group.addresses, security=security)) as client:
        assert client.append(b"mine").index >= 0

    assert begin_as_peer(group, N0, TlsFiles(certs_of(group) / "ca.crt"), sender=N1) is None


def test_clients_may_have_a_ca_of_their_own(make_group: Callable[..., Group], tmp_path: Path) -> None:
    """Whoever can sign clients' certificates can then make no node."""
    clients = tmp_path / "clients"
    certs.make_authority(clients)
    certs.make_client(clients, "billing")
    certs.make_node(clients, "n1")
    group = make_group(tls=True, settings={"tls_client_trust_cert_path": str(clients / "ca.crt")})
    group.start_all()

    billing = ClientSecurity(files(clients, "billing", ca=certs_of(group) / "ca.crt"))
    with closing(DLedgerClient(group.addresses, timeout_s=60, security=billing)) as client:
        assert client.append(b"mine").index >= 0
    refusal(group, group.security, "does not trust the CA of our certificate")
    imposter = files(clients, "n1", ca=certs_of(group) / "ca.crt")
    assert begin_as_peer(group, N0, imposter, sender=N1) is None


def test_commands_are_told_what_they_need(secured: Group) -> None:
    """By options or variables; without them they say which, with the exit code of a failure."""
    here = certs_of(secured)
    environ = {**os.environ, "DLEDGER_BOOTSTRAP": ",".join(secured.addresses)}
    with_tls = {
        **environ,
        "DLEDGER_TLS_CA": str(here / "ca.crt"),
        "DLEDGER_TLS_CERT": str(here / "client.crt"),
        "DLEDGER_TLS_KEY": str(here / "client.key"),
    }

    plain = dledger("append", "x", "--timeout", "30", environ=environ)
    sealed = dledger(
        "append", "-", "--timeout", "30", environ=with_tls, stdin="x\n"
    )  # sent again should the leader change meanwhile
    own = dledger("health", secured.addresses[0], "--timeout", "30", environ=with_tls)
    half = dledger("status", "--tls-cert", str(here / "client.crt"), environ=environ)

    assert plain.returncode == 1, plain.stderr
    assert "--tls-ca" in plain.stderr
    assert sealed.returncode == 0, sealed.stderr
    assert own.returncode == 0, own.stderr
    assert half.returncode == 2, half.stderr
    assert "--tls-ca" in half.stderr


def dledger(*words: str, environ: dict[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dledger_cli.entry", *words]
    return subprocess.run(command, env=environ, input=stdin, capture_output=True, text=True, timeout=60, check=False)


# --- peers -----------------------------------------------------------------------------------------------------------


def begin_as_peer(
    group: Group, target: NodeId, shown: TlsFiles, *, sender: NodeId, purpose: Purpose = Purpose.CONTROL
) -> Frame | None:
    """Shake hands with a node in the name of ``sender``, showing some certificate; its answer, None if it hangs up."""
    config = like_the_members(group, target)
    context = tls.client_context(tls.read(shown))
    try:
        with PeerWire((HOST, group.nodes[target].peer_port), context) as wire:
            wire.link.sendall(handshake_frame(config, sender, purpose))
            return wire.frame()
    except ssl.SSLError:
        return None


def test_only_a_member_speaks_in_its_name(secured: Group, tmp_path: Path) -> None:
    """n1's certificate is no good for n2, a client's for nobody, an expired or a stranger's not even for a word."""
    here, other = certs_of(secured), tmp_path / "other"
    certs.make_authority(other)
    certs.make_node(other, "n1")
    certs.make_client(here, "n7")
    leader = secured.leader()
    target, sender, third = secured.followers(leader)[0], secured.followers(leader)[1], leader
    late = tmp_path / "late"
    late.mkdir()
    for name in ("ca", sender):
        for suffix in (".crt", ".key"):
            (late / f"{name}{suffix}").write_bytes((here / f"{name}{suffix}").read_bytes())
    expire(late, sender)

    with undisturbed(secured):
        ends = {
            (name, purpose): begin_as_peer(secured, target, shown, sender=claimed, purpose=purpose)
            for purpose in Purpose
            for name, shown, claimed in (
                ("itself", files(here, sender), sender),
                ("another", files(here, third), sender),
                ("a client", files(here, "client"), sender),
                ("nobody", TlsFiles(here / "ca.crt"), sender),
                ("a stranger", files(other, "n1", ca=here / "ca.crt"), N1),
                ("expired", files(late, sender), sender),
            )
        }

    words = dict.fromkeys(("another", "a client"), f"does not belong to {sender}")
    for (name, _), frame in ends.items():
        if name == "itself":
            assert frame is not None
            assert frame[0] is FrameKind.HANDSHAKE_ANSWER
        elif name in words:
            assert frame is not None
            assert frame[0] is FrameKind.REFUSAL
            assert words[name].encode() in bytes(frame[1])
        else:
            assert frame is None, name


def test_peer_ports_take_no_clients(secured: Group) -> None:
    """Not even those with a good certificate; and a client port serves no member."""
    leader = secured.nodes[secured.leader()]
    shown = files(certs_of(secured), "client")
    with undisturbed(secured):
        frame = begin_as_peer(secured, leader.node_id, shown, sender=NodeId("client"))
        credentials = channel_credentials(shown)
        with (
            grpc.secure_channel(leader.grpc_address, credentials) as channel,
            pytest.raises(grpc.RpcError) as raised,
        ):
            channel.unary_unary("/dledger.v1.RaftService/Vote", None, None)(b"", timeout=60)

    assert frame is not None
    assert frame[0] is FrameKind.REFUSAL
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def start_refused(group: Group, node: NodeId, *settings: str) -> str:
    """Start a node that must not start; what it says."""
    words = [*group.command(node), *(word for one in settings for word in ("--set", one))]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_a_node_with_a_bad_certificate_does_not_start(make_group: Callable[..., Group], tmp_path: Path) -> None:
    """It would be refused by all others: better it says so itself, names the file, and leaves the port alone."""
    group = make_group(tls=True)
    here, other = certs_of(group), tmp_path / "other"
    certs.make_authority(other)
    certs.make_node(other, "n0")
    certs.make_client(here, "n9")

    (here / "n0.crt").rename(here / "kept.crt")
    missing = start_refused(group, N0)
    (here / "n0.crt").write_bytes((here / "n1.crt").read_bytes())
    mismatch = start_refused(group, N0)
    (here / "n0.key").rename(here / "kept.key")
    (here / "n0.key").write_bytes((here / "n1.key").read_bytes())
    wrong_name = start_refused(group, N0)
    for suffix in (".crt", ".key"):
        (here / f"n0{suffix}").write_bytes((other / f"n0{suffix}").read_bytes())
    wrong_ca = start_refused(group, N0)
    for suffix in (".crt", ".key"):
        (here / f"n0{suffix}").write_bytes((here / f"n9{suffix}").read_bytes())
    clients = start_refused(group, N0)
    (here / "kept.crt").rename(here / "n0.crt")
    (here / "kept.key").rename(here / "n0.key")
    expire(here, "n0")
    expired = start_refused(group, N0)

    assert "n0.crt: cannot be read: No such file" in missing
    assert "n0.key: does not match the certificate in" in mismatch
    assert "does not belong to n0: its subjectAltName has n1, localhost, but must have DNS:n0" in wrong_name
    assert "unable to get local issuer certificate" in wrong_ca
    assert "unsuitable certificate purpose" in clients
    assert "certificate has expired" in expired


def test_plaintext_beyond_loopback_needs_a_word(make_group: Callable[..., Group]) -> None:
    """Both servers and clients refuse, and say both ways out; with the word the server starts."""
    group = make_group(size=1)
    words = [sys.executable, "-m", "dledger_cli.cli"]
    members = f"n0-{HOST}:{group.nodes[N0].peer_port}"
    serve = [*words, "serve", "-p", members, "-s", str(group.directory), "--client-port", "0"]
    refused = [
        subprocess.run(one, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
        for one in (
            [*serve, "--set", "client_host=0.0.0.0"],
            [*words, "broker", "-s", str(group.directory), "--port", "0", "--set", "brokerIP1=10.0.0.7"],
            [*words, "append", "-b", "10.0.0.1:30911", "x"],
            [*words, "message", "send", "-b", "10.0.0.1:10911", "-t", "x", "x"],
        )
    ]
    started = subprocess.run(
        [*serve, "--set", "client_host=0.0.0.0", "--insecure", "--until-stdin-closes"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    for done in refused:
        assert done.returncode == 2, done.stderr
        assert "plaintext is for loopback addresses" in done.stderr
        assert "insecure" in done.stderr
        assert "tls" in done.stderr
    assert started.returncode == 0, started.stderr
    with pytest.raises(ConfigError, match="insecure=True"):
        DLedgerClient("10.0.0.1:30911")
    with pytest.raises(ConfigError, match="insecure=True"):
        Admin("10.0.0.1:10911")
    DLedgerClient("10.0.0.1:30911", security=ClientSecurity(insecure=True)).close()


def test_a_node_without_tls_stays_outside(secured: Group) -> None:
    """Plaintext against TLS, both ways: it joins nothing, both sides log why, and the majority goes on."""
    leader = secured.leader()
    odd = secured.followers(leader)[0]
    secured.stop(odd)
    tls_settings, secured.tls = secured.tls, None
    secured.start(odd)
    secured.tls = tls_settings

    wait_until(
        lambda: (
            f"{leader} does not talk to {odd}: {odd} at" in secured.logs(leader)
            and "not use TLS: configure certificates on all members, or on none" in secured.logs(leader)
        ),
        "the leader says why",
    )
    wait_until(lambda: "this node does not use TLS" in secured.logs(odd), "the odd one says why")
    secured.append(10)
    secured.stop(odd)
    secured.start(odd)
    secured.verify()


# --- failures and renewal under load ---------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_killed_leader_is_replaced_with_tls(secured: Group) -> None:
    """As without: nothing that was acknowledged is lost."""
    with secured.workload() as load:
        for _ in range(2):
            load.history.wait_for_acks(100)
            leader = secured.leader()
            secured.kill(leader)
            secured.leader(other_than=leader)
            load.history.wait_for_acks(100)
            secured.start(leader)

    secured.verify()


def serial_at(port: int, shown: TlsFiles) -> int:
    """The serial number of the certificate that a port shows."""
    context = tls.client_context(tls.read(shown))
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((HOST, port), timeout=60) as link, context.wrap_socket(link) as sealed:
        found = sealed.getpeercert() or {}
        return int(str(found["serialNumber"]), 16)


def says(group: Group, node: NodeId, *words: str) -> bool:
    """Whether a line of a node's log has all the words."""
    return any(all(one in line for one in words) for line in group.logs(node).splitlines())


def serial_of(path: Path) -> int:
    return int(certs.look_at(path).serial, 16)


def test_certificates_are_renewed_under_load(secured: Group) -> None:
    """New keys for all nodes and clients while they work: no append is lost, nobody restarts, no leader changes.

    Then a node dies and comes back, and a leader is replaced: with connections of the new certificates only.
    """
    here = certs_of(secured)
    pids = {node: secured.pid(node) for node in secured.nodes}
    term = secured.term()
    with secured.workload() as load:
        load.history.wait_for_acks(100)
        for name in ("n0", "n1", "n2", "client"):
            certs.renew(here, name, new_key=True)
        for node, one in secured.nodes.items():
            for port in (one.peer_port, one.client_port, one.grpc_port):
                assert serial_at(port, files(here, node)) == serial_of(here / f"{node}.crt")
        load.history.wait_for_acks(100)
        assert secured.term() == term
        assert {node: secured.pid(node) for node in secured.nodes} == pids
        for node in secured.nodes:
            wait_until(partial(says, secured, node, "switched to its new TLS certificate"), "it says so")
        leader = secured.leader()
        secured.kill(leader)
        secured.leader(other_than=leader)
        secured.start(leader)
        load.history.wait_for_acks(100)

    secured.verify()


def test_files_that_do_not_fit_change_nothing(secured: Group) -> None:
    """A half-written or a mismatched pair: the old one goes on, with one line that says so, until a good one comes."""
    here, node = certs_of(secured), secured.leader()
    one, pair = secured.nodes[node], certs.Pair.named(here, node)
    before, good = serial_of(pair.cert), pair.cert.read_bytes()
    client = files(here, "client")

    with undisturbed(secured):
        for bad, words in (
            (good[: len(good) // 2], "cannot be used"),
            (b"", "contains no PEM certificate"),
            (certs.Pair.named(here, "client").cert.read_bytes(), "does not match the certificate in"),
        ):
            pair.cert.write_bytes(bad)
            assert serial_at(one.client_port, client) == serial_at(one.grpc_port, client) == before
            assert serial_at(one.peer_port, client) == before
            wait_until(partial(says, secured, node, "keeps its old", words), f"a line about {words}")
        pair.cert.write_bytes(good)
        certs.renew(here, node)
        after = serial_of(pair.cert)
        assert after != before
        assert serial_at(one.client_port, client) == serial_at(one.grpc_port, client) == after
        assert serial_at(one.peer_port, client) == after


# --- those who say nothing -------------------------------------------------------------------------------------------


@contextmanager
def silent_links(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that begin with TLS, each after a part of a hello, and say no more."""
    with ExitStack() as links:
        made = []
        for number in range(count):
            link = links.enter_context(closing(socket.create_connection((HOST, port), timeout=60)))
            link.sendall(b"\x16\x03\x01\x02\x00\x01"[: number % 7])
            made.append(link)
        yield made


def test_silence_within_a_tls_handshake_holds_nothing(secured: Group) -> None:
    """More half-open handshakes than a node has places for peers: a peer that reconnects meanwhile finds one."""
    leader = secured.leader()
    node = secured.followers(leader)[0]
    with silent_links(secured.nodes[node].peer_port, 100) as links:
        secured.stop(leader)
        secured.leader(other_than=leader)
        secured.append(10)
        secured.start(leader)
        threads = len(list(Path(f"/proc/{secured.pid(node)}/task").iterdir()))
        for link in links:
            try:
                while link.recv(4096):
                    pass
            except ConnectionError:
                continue

    assert threads < 60
    secured.verify()


# --- brokers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_brokers_speak_tls(tmp_path: Path, plain: bool) -> None:
    """Send, consume and administer with a certificate; without one, or in plaintext, it is told what is missing."""
    with LocalBrokers(tmp_path, size=1 if plain else 3, plain=plain, tls=True) as brokers:
        with brokers.producer(timeout_s=60) as producer:
            result = producer.send(Message("orders", b"hello"))
        with brokers.consumer("billing", "orders", timeout_s=60) as consumer:
            assert [one.body for one in consumer.poll(timeout_s=20)] == [b"hello"]
        heard = []
        assert brokers.tls is not None
        for security in (None, ClientSecurity(TlsFiles(brokers.tls.directory / "ca.crt"))):
            with Admin(brokers.addresses, security=security) as admin, pytest.raises(DLedgerError) as raised:
                admin.topics()
            heard.append(str(raised.value))

    assert result.message_id
    assert "accepts only TLS: give the CA of its certificate" in heard[0]
    assert "if it requires certificates of its clients, give one" in heard[1]
