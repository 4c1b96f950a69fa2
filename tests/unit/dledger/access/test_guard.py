"""Who is let in, what he may, and what happens when the rules change."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from dledger.access import guard
from dledger.access.guard import (
    AccessGuard,
    Caller,
    NotAuthenticatedError,
    OtherAudienceError,
    ResourceKind,
    SessionsFullError,
    Signed,
)
from dledger.access.quota import Limits, Quotas, TooManyWaitsError
from dledger.access.rules import Permission, parse_rules
from dledger.clock import Clock
from dledger.errors import AccessDeniedError
from tests.support.grpc_client import Signer

METHOD = "/service/Method"
HERE = "ipv4:10.0.0.1:4711"
PUB, SUB = Permission.PUB, Permission.SUB
RULES = """\
accounts:
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - orders=PUB
  groupPerms:
  - billing=SUB
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: local
  secretKey: local-secret
  whiteRemoteAddress: 10.0.0.9
  topicPerms:
  - orders=SUB
"""
Metadata = tuple[tuple[str, str], ...]


class FakeClock(Clock):
    def __init__(self) -> None:
        self.now_ms = time.time_ns() // 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic_ms(self) -> int:
        return self.now_ms


@dataclass
class Server:
    """A guard, and calls to it as a client's channel makes them."""

    rules: str = RULES
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.guard = AccessGuard(parse_rules(self.rules), name="n0", clock=self.clock)
        self.quotas = Quotas(Limits(20, 200, 4, 4), owner_percent=50)

    def admit(
        self, metadata: Metadata, body: bytes | None = b"body", *, method: str = METHOD, peer: str = HERE
    ) -> Caller:
        return self.guard.admit(method, metadata, peer, body, self.quotas)

    def signer(self, key: str = "alice", secret: str = "alice-secret") -> Signer:
        """One that has spoken to this server before."""
        signer = Signer(key, secret)
        assert signer.learn("here", {guard.REFUSAL: guard.CHALLENGE, guard.AUDIENCE: self.guard.audience})
        return signer

    def call(self, key: str = "alice", secret: str = "alice-secret", *, peer: str = HERE) -> Caller:
        return self.admit(self.signer(key, secret).sign(METHOD, "here", b"body"), peer=peer)


@pytest.fixture
def server() -> Server:
    return Server()


def changed(metadata: Metadata, name: str, value: str) -> Metadata:
    return tuple((key, value if key == name else old) for key, old in metadata)


def test_a_signed_request_is_let_in(server: Server) -> None:
    """With the permissions of its account."""
    caller = server.call()

    assert caller.name == "alice"
    assert caller.may(ResourceKind.TOPIC, "orders", PUB)
    assert not caller.may(ResourceKind.TOPIC, "orders", SUB)
    assert caller.may(ResourceKind.GROUP, "billing", SUB)
    assert not caller.may(ResourceKind.GROUP, "orders", SUB)


@pytest.mark.parametrize(
    ("key", "secret", "said"),
    [
        ("alice", "wrong-secret", "unknown access key, or the signature does not match its secret"),
        ("nobody", "alice-secret", "unknown access key, or the signature does not match its secret"),
    ],
)
def test_unknown_keys_and_wrong_secrets_are_refused_alike(server: Server, key: str, secret: str, said: str) -> None:
    """Nobody learns which keys exist."""
    with pytest.raises(NotAuthenticatedError, match=said):
        server.call(key, secret)


def test_without_a_key_nothing_goes(server: Server) -> None:
    """Deny by default."""
    with pytest.raises(NotAuthenticatedError, match="an access key and its secret"):
        server.admit(())


@pytest.mark.parametrize("name", [guard.TIMESTAMP, guard.NONCE, guard.AUDIENCE, guard.SIGNATURE, guard.ACCESS_KEY])
def test_every_part_is_signed(server: Server, name: str) -> None:
    """Nothing can be replaced by something just as good."""
    signed = server.signer().sign(METHOD, "here", b"body")
    replaced = {
        guard.TIMESTAMP: str(int(dict(signed)[guard.TIMESTAMP]) + 1),
        guard.NONCE: "0123456789abcdef-1",
        guard.AUDIENCE: "n1.x",
        guard.SIGNATURE: "0" * 64,
        guard.ACCESS_KEY: "root",
    }

    with pytest.raises(NotAuthenticatedError, match="the signature does not match its secret"):
        server.admit(changed(signed, name, replaced[name]))
    server.admit(signed)


@pytest.mark.parametrize("change", ["", "cut", "longer", "upper"])
def test_a_signature_is_compared_as_a_whole(server: Server, change: str) -> None:
    """Not as far as it goes: an empty one would fit everything."""
    signed = server.signer().sign(METHOD, "here", b"body")
    whole = dict(signed)[guard.SIGNATURE]
    wrong = {"": "", "cut": whole[:-1], "longer": whole + "0", "upper": "x" + whole[1:]}[change]

    with pytest.raises(NotAuthenticatedError):
        server.admit(changed(signed, guard.SIGNATURE, wrong))
    server.admit(signed)


def test_the_body_and_the_method_are_signed(server: Server) -> None:
    """A captured signature is worth nothing for another request."""
    signed = server.signer().sign(METHOD, "here", b"body")

    for body, method in ((b"other", METHOD), (None, METHOD), (b"body", "/service/Other")):
        with pytest.raises(NotAuthenticatedError):
            server.admit(signed, body, method=method)


def test_a_request_is_taken_once(server: Server) -> None:
    """The same nonce again is a replay."""
    signed = server.signer().sign(METHOD, "here", b"body")
    server.admit(signed)

    with pytest.raises(NotAuthenticatedError, match="replayed request"):
        server.admit(signed)


def test_what_another_process_was_sent_is_refused_here(server: Server) -> None:
    """Another member, or this one before it was restarted, whose memory of nonces this one does not have."""
    signed = server.signer().sign(METHOD, "here", b"body")

    with pytest.raises(OtherAudienceError):
        Server().admit(signed)


def test_a_client_learns_for_whom_to_sign(server: Server) -> None:
    """Its first request to a process is refused with that process's name; only a genuine one is told it."""
    signer = Signer("alice", "alice-secret")
    with pytest.raises(OtherAudienceError):
        server.admit(signer.sign(METHOD, "here", b"body"))

    assert not signer.learn("here", {guard.REFUSAL: guard.DENIED})
    assert signer.learn("here", {guard.REFUSAL: guard.CHALLENGE, guard.AUDIENCE: server.guard.audience})
    server.admit(signer.sign(METHOD, "here", b"body"))
    with pytest.raises(NotAuthenticatedError, match="unknown"):
        server.admit(Signer("alice", "wrong-secret").sign(METHOD, "here", b"body"))


@pytest.mark.parametrize("skew_ms", [guard.WINDOW_MS + 5000, -guard.WINDOW_MS - 5000])
def test_old_and_future_requests_are_refused_with_the_servers_time(server: Server, skew_ms: int) -> None:
    """Whose clock is wrong can be seen."""
    signed = server.signer().sign(METHOD, "here", b"body")
    server.clock.now_ms = int(dict(signed)[guard.TIMESTAMP]) + skew_ms

    with pytest.raises(NotAuthenticatedError, match=r"this server's clock reads 20\d\d-.*Z.*synchronize the clocks"):
        server.admit(signed)


@pytest.mark.parametrize("nonce", ["", "x", "0123456789abcdef", "0123456789abcdef-", "0123456789abcdef--1", "é" * 20])
def test_a_nonce_that_is_none_is_refused(server: Server, nonce: str) -> None:
    """Also when it is signed."""
    audience, stamp = server.guard.audience, str(server.clock.now_ms)
    signature = guard._signature(b"alice-secret", METHOD, "alice", stamp, nonce, audience, guard.digest_of(b"body"))
    metadata = (
        (guard.ACCESS_KEY, "alice"),
        (guard.TIMESTAMP, stamp),
        (guard.NONCE, nonce),
        (guard.AUDIENCE, audience),
        (guard.SIGNATURE, signature),
    )

    with pytest.raises(NotAuthenticatedError, match="malformed timestamp or nonce"):
        server.admit(metadata)


def test_too_many_clients_are_refused_and_may_come_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of nonces is bounded; the error is one that clients repeat."""
    monkeypatch.setattr(server.guard._seen, "_account_sessions_max", 1)
    server.call()

    with pytest.raises(SessionsFullError, match="retry later"):
        server.call()


def test_a_white_address_saves_the_signature_and_nothing_else(server: Server) -> None:
    """RocketMQ would allow everything; here the account's permissions hold."""
    key = ((guard.ACCESS_KEY, "local"),)

    caller = server.admit(key, peer="ipv4:10.0.0.9:1")

    assert caller.may(ResourceKind.TOPIC, "orders", SUB)
    assert not caller.may(ResourceKind.TOPIC, "orders", PUB)
    with pytest.raises(NotAuthenticatedError):
        server.admit(key, peer=HERE)
    with pytest.raises(NotAuthenticatedError):
        server.admit(key, peer="unix:/run/socket")


def test_a_globally_white_address_may_everything() -> None:
    """As RocketMQ has it."""
    server = Server("globalWhiteRemoteAddresses:\n- 10.0.0.*\n")

    assert server.admit((), peer="ipv4:10.0.0.77:1").account.admin
    with pytest.raises(NotAuthenticatedError):
        server.admit((), peer="ipv4:10.0.1.1:1")


def test_refusals_and_changes_are_audited_without_secrets(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Who, from where, what, on what, why; a claimed name is marked; repeated refusals are counted."""
    caplog.set_level(logging.INFO, "dledger.audit")
    alice, root = server.call(), server.call("root", "root-secret")
    caplog.clear()

    for _ in range(3):
        with pytest.raises(AccessDeniedError, match="alice is not allowed to do this: Send needs PUB on topic paid"):
            server.guard.require(alice, "Send", ResourceKind.TOPIC, "paid", PUB)
    with pytest.raises(AccessDeniedError):
        server.guard.require_admin(alice, "DeleteTopic", 'topic:a"\nresult=allowed')
    server.guard.require_admin(root, "PutTopic", "topic:paid")
    with pytest.raises(AccessDeniedError):
        server.call("alice", "a-wrong-secret")
    server.guard.audit.flush()

    assert [one.getMessage() for one in caplog.records] == [
        "result=denied action=Send resource=topic:paid caller=alice from=10.0.0.1:4711 "
        'reason="needs PUB on topic paid"',
        'result=denied action=DeleteTopic resource="topic:a\\"\\nresult=allowed" caller=alice from=10.0.0.1:4711 '
        'reason="requires an account with admin: true"',
        "result=allowed action=PutTopic resource=topic:paid caller=root from=10.0.0.1:4711",
        "result=denied action=Method caller=alice? from=10.0.0.1:4711 "
        'reason="unknown access key, or the signature does not match its secret"',
        "result=denied action=Send resource=topic:paid caller=alice from=10.0.0.1 "
        'reason="needs PUB on topic paid" repeated=2',
    ]
    assert "secret" not in caplog.text.replace("match its secret", "")


# --- changes ----------------------------------------------------------------------------------------------------------


def test_new_rules_reach_open_streams(server: Server) -> None:
    """A revoked key and a taken permission end theirs; others go on with their new permissions."""
    ended: list[str] = []
    alice, root = server.call(), server.call("root", "root-secret")
    server.guard.enter(alice, lambda why: ended.append(f"alice: {why}"), lambda: True)
    server.guard.enter(root, lambda why: ended.append(f"root: {why}"), lambda: root.account.admin)

    server.guard.apply(parse_rules(RULES.replace("orders=PUB", "orders=SUB").replace("admin: true", "admin: false")))

    assert ended == ["root: permission revoked"]
    assert alice.may(ResourceKind.TOPIC, "orders", SUB)
    assert not alice.may(ResourceKind.TOPIC, "orders", PUB)

    server.guard.apply(parse_rules(RULES.replace("alice-secret", "another-secret")))

    assert ended[1:] == ["alice: access key revoked"]
    server.guard.leave(alice)
    with pytest.raises(AccessDeniedError, match="access key revoked"):
        server.guard.renew(alice, "Pull")


def test_a_caller_by_address_is_ended_when_the_address_is_white_no_more() -> None:
    """Globally, and of an account."""
    rules = RULES + "globalWhiteRemoteAddresses:\n- 10.0.0.1\n"
    server, ended = Server(rules), list[str]()
    trusted = server.admit(())
    local = server.admit(((guard.ACCESS_KEY, "local"),), peer="ipv4:10.0.0.9:1")
    for caller in (trusted, local):
        server.guard.enter(caller, ended.append, lambda: True)

    server.guard.apply(parse_rules(rules))
    assert ended == []

    server.guard.apply(parse_rules(RULES.replace("10.0.0.9", "10.0.0.8")))
    assert ended == ["access key revoked"] * 2


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_an_accounts_share_is_counted_over_all_its_calls(server: Server) -> None:
    """And given back; streams and waits are refused by name."""
    first, second = server.call(), server.call()
    other = server.call("root", "root-secret")

    first.quota.take(10, 5)

    assert [one.quota.is_full for one in (first, second, other)] == [True, True, False]
    assert "10 entries of 5 bytes waiting" in str(second.quota.full_error())
    with ExitStack() as held:
        for quota in (first.quota, second.quota):
            held.enter_context(quota.stream("append", "streams_max"))
            held.enter_context(quota.wait("waits_max"))
        with pytest.raises(TooManyWaitsError, match=r"alice has 2 open append streams, .*account_share_percent"):
            held.enter_context(first.quota.stream("append", "streams_max"))
        with pytest.raises(TooManyWaitsError, match=r"alice has 2 waiting pulls"):
            held.enter_context(first.quota.wait("waits_max"))
    first.quota.give(10, 5)
    assert [one.quota.is_full for one in (first, second, other)] == [False] * 3
    assert second.quota.idle


def test_a_share_is_never_nothing() -> None:
    """One percent of few is one."""
    assert Limits(10, 1000, 50, 1, 500).share(1) == Limits(1, 10, 1, 1, 5)


def test_what_metadata_lacks_is_empty() -> None:
    """Binary values are none of ours."""
    assert Signed.of((("dledger-access-key", b"x"), ("other", "y"))) == Signed("", "", "", "", "")


# -- protocols with signatures of their own ----------------------------------------------------------------------------


def admit_signed(server: Server, key: str, secret: str = "alice-secret", *peers: str) -> Caller:
    """A request under ``secret``, from here unless said otherwise."""
    return server.guard.admit_signed("Ask", key, peers or (HERE,), lambda one: one == secret.encode(), server.quotas)


def test_a_request_of_another_protocol_is_let_in_by_its_own_signature(server: Server) -> None:
    """With the permissions and the limits of its account."""
    caller = admit_signed(server, "alice")
    assert (caller.name, caller.signed, caller.quota.owner) == ("alice", True, "alice")
    assert caller.may(ResourceKind.TOPIC, "orders", PUB)


@pytest.mark.parametrize(
    ("key", "secret", "said"),
    [
        ("alice", "wrong-secret", "unknown access key, or the signature does not match its secret"),
        ("nobody", "alice-secret", "unknown access key, or the signature does not match its secret"),
        ("nobody", "", "unknown access key, or the signature does not match its secret"),
        ("", "alice-secret", "this server requires an access key and its secret"),
    ],
)
def test_without_its_signature_it_is_refused_and_audited(
    server: Server, key: str, secret: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown key is looked at like a known one: its signature is computed."""
    with caplog.at_level(logging.WARNING, "dledger.audit"), pytest.raises(NotAuthenticatedError, match=said):
        admit_signed(server, key, secret)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "action=Ask" in line
    assert said in line
    assert "wrong-secret" not in line


def test_its_white_lists_must_include_everybody_it_came_through() -> None:
    """The first of them is only what the second says."""
    server = Server("globalWhiteRemoteAddresses:\n- 10.1.0.*\n" + RULES)
    trusted, other, local = "ipv4:10.1.0.7:1", "ipv4:10.2.0.7:1", "ipv4:10.0.0.9:1"
    assert admit_signed(server, "", "", trusted).name == "trusted-address"
    assert admit_signed(server, "alice", "wrong-secret", trusted, trusted).account.admin
    assert admit_signed(server, "local", "wrong-secret", local, local).name == "local"
    for peers in ((trusted, other), (other, trusted), (local, trusted), (trusted, local), (local, "nobody")):
        for key in ("", "alice", "local"):
            with pytest.raises(NotAuthenticatedError):
                admit_signed(server, key, "wrong-secret", *peers)
