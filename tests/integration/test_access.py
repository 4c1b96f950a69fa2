"""Access control of real nodes: who is refused and how, and that the group does not even notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dledger.access import guard
from dledger.client import AppendResult, ClientSecurity, DLedgerClient, ReadMode
from dledger.errors import AccessDeniedError, DLedgerError
from dledger.rpc import options
from dledger.rpc.clients import codec
from dledger.types import Magic
from tests.integration.access_harness import ALICE, BOB, NOBODY, ROOT, RULES, SecuredGroup, unharmed
from tests.integration.conftest import Adopt
from tests.support import grpc_log
from tests.support.signed_calls import SignedCalls
from tests.support.waiting import wait_until

APPEND = options.method(options.LOG_SERVICE, "Append")
BODY = grpc_log.encode_append(codec.Append("default", [b"by hand"]))


@pytest.fixture
def secured(adopt: Adopt, tmp_path: Path) -> SecuredGroup:
    """Three nodes with access control that have a leader."""
    made = adopt(SecuredGroup(tmp_path / "group"))
    made.start_all()
    made.leader()
    return made


def pipelined(client: DLedgerClient) -> AppendResult:
    return client.submit(b"x").result(60)


def everything(client: DLedgerClient) -> dict[str, Callable[[], object]]:
    """All that a client can ask."""
    return {
        "append": lambda: client.append(b"x"),
        "append_many": lambda: client.append_many([b"x"]),
        "submit": lambda: pipelined(client),
        "read": lambda: client.read(0),
        "follow": lambda: next(iter(client.follow(0))),
        "metadata": lambda: client.metadata(),
        "members_status": lambda: client.members_status(),
        "watch_role": lambda: next(iter(client.watch_role())),
        "transfer": lambda: client.transfer_leadership(),
    }


@pytest.mark.parametrize(
    ("security", "allowed", "said"),
    [
        (NOBODY, set(), "an access key and its secret"),
        (ClientSecurity(access_key="alice", secret_key="wrong-secret"), set(), "unknown access key, or"),
        (ClientSecurity(access_key="carol", secret_key="alice-secret"), set(), "unknown access key, or"),
        (BOB, {"metadata", "members_status", "watch_role"}, "bob is not allowed to do this: "),
        (
            ALICE,
            {"append", "append_many", "submit", "read", "follow", "metadata", "members_status", "watch_role"},
            "alice is not allowed to do this: TransferLeadership requires an account with admin: true",
        ),
    ],
    ids=["no key", "wrong secret", "unknown key", "no permission", "no administrator"],
)
def test_who_may_not_is_refused_clearly_and_nobody_else_notices(
    secured: SecuredGroup, security: ClientSecurity, allowed: set[str], said: str
) -> None:
    """Every call by everybody: AccessDeniedError, safe to repeat, at once; votes and heartbeats go on."""
    done: set[str] = set()
    errors: list[AccessDeniedError] = []
    with unharmed(secured), closing(secured.client(security=security)) as client:
        for name, ask in everything(client).items():
            try:
                ask()
            except AccessDeniedError as error:
                errors.append(error)
            else:
                done.add(name)

    assert done == allowed
    assert [str(one) for one in errors if said not in str(one)] == []
    assert {one.outcome for one in errors} == {"not_applied"}
    audit = "".join(secured.logs(node) for node in secured.nodes)
    assert "dledger.audit result=denied action=" in audit
    assert "secret" not in audit.replace("its secret", "")


def test_replayed_aged_and_altered_requests_are_refused(secured: SecuredGroup) -> None:
    """Each would be taken if it were not for that one thing; none gets into the log."""
    leader = secured.leader()
    follower = secured.followers(leader)[0]
    address = secured.nodes[leader].grpc_address
    with unharmed(secured), SignedCalls(address, "alice", "alice-secret") as calls:
        calls.meet(APPEND, BODY)
        signed = calls.metadata(APPEND, BODY)
        good = calls.call(APPEND, BODY, signed)
        replayed = calls.call(APPEND, BODY, signed)
        stale = calls.call(APPEND, BODY, calls.metadata(APPEND, BODY, age_ms=guard.WINDOW_MS + 2000))
        other_body = calls.call(APPEND, BODY + BODY, calls.metadata(APPEND, BODY))
        other_method = calls.call(APPEND, BODY, calls.metadata(APPEND + "Stream", BODY))
        with SignedCalls(secured.nodes[follower].grpc_address) as elsewhere:
            captured = elsewhere.call(APPEND, BODY, calls.metadata(APPEND, BODY))

    assert good.code is grpc.StatusCode.OK
    assert grpc_log.decode_appended(good.data)[1]
    refused = (replayed, stale, other_body, other_method, captured)
    assert {one.code for one in refused} == {grpc.StatusCode.UNAUTHENTICATED}
    assert "replayed request" in replayed.details
    assert "this server's clock reads" in stale.details
    assert "the signature does not match its secret" in other_body.details
    assert "the signature does not match its secret" in other_method.details
    assert "signed for another server process" in captured.details
    with closing(secured.client()) as root:
        log = [entry.body for entry in root.read(0, mode=ReadMode.LINEARIZABLE)]
    assert log.count(b"by hand") == 1


def test_a_captured_request_is_worth_nothing_after_a_restart(secured: SecuredGroup) -> None:
    """The new process has no memory of what the old one took, and takes nothing that was signed for that one."""
    node = secured.followers(secured.leader())[0]
    method, body = options.method(options.LOG_SERVICE, "Metadata"), codec.encode_metadata_request("default")
    with SignedCalls(secured.nodes[node].grpc_address, "alice", "alice-secret") as calls:
        calls.meet(method, body)
        signed = calls.metadata(method, body)
        before = calls.call(method, body, signed)

        secured.stop(node)
        secured.start(node)
        after = calls.call(method, body, signed)

    assert before.code is grpc.StatusCode.OK
    assert after.code is grpc.StatusCode.UNAUTHENTICATED
    with closing(secured.client(security=ALICE)) as client:
        assert client.metadata(secured.nodes[node].client_address)


def test_a_client_goes_on_when_its_node_restarts(secured: SecuredGroup) -> None:
    """Its requests are signed anew, for the new process; streams are opened again."""
    with closing(secured.client(60, security=ALICE)) as client:
        client.append(b"before")
        leader = secured.leader()
        secured.stop(leader)
        client.append(b"meanwhile")
        secured.start(leader)
        secured.stop(secured.leader())
        client.append(b"after")
        bodies = [entry.body for entry in client.read(0) if entry.magic is Magic.NORMAL]

    assert bodies == [b"before", b"meanwhile", b"after"]


def test_a_revoked_key_ends_open_streams(secured: SecuredGroup) -> None:
    """An idle follower is ended, what is submitted refused, others do not notice; given back, the key works again."""
    with unharmed(secured), closing(secured.client(security=BOB)) as bob, closing(secured.client()) as root:
        secured.rules.write(RULES.replace("- paid=SUB", "- default=PUB|SUB"))
        wait_until(lambda: allowed(lambda: bob.append(b"bob's")), "the new permission is in force")
        follower = iter(bob.follow(root.metadata().end_index))
        next(follower)
        bob.submit(b"bob's").result(60)

        secured.rules.write(RULES.partition("- accessKey: bob")[0])

        with pytest.raises(AccessDeniedError):
            for _ in follower:
                pass
        wait_until(lambda: not allowed(lambda: bob.submit(b"late").result(60)), "what is submitted is refused")
        with pytest.raises(AccessDeniedError):
            bob.submit(b"late").result(60)
        secured.rules.write(RULES.replace("- paid=SUB", "- default=PUB|SUB"))
        wait_until(lambda: allowed(lambda: bob.append(b"again")), "the key is good again")


def allowed(work: Callable[[], object]) -> bool:
    """Whether it was done."""
    try:
        work()
    except DLedgerError:
        return False
    return True


def test_rules_change_under_load_and_broken_ones_change_nothing(secured: SecuredGroup) -> None:
    """Eight versions, every other one broken: whoever may by all of them is not interrupted."""
    with unharmed(secured) as load:
        for version in range(8):
            broken = version % 2
            text = RULES + f"- accessKey: extra{version}\n  secretKey: extra-secret\n"
            secured.rules.write("accounts: [" if broken else text)
            told = "cannot reload access rules" if broken else "reloaded access rules"
            count = version // 2 + 1

            def heard(told: str = told, count: int = count) -> bool:
                return all(secured.logs(node).count(told) >= count for node in secured.nodes)

            wait_until(heard, f"version {version} is read by all")
            load.wait_for(2)

    with closing(secured.client(security=ClientSecurity(access_key="extra6", secret_key="extra-secret"))) as client:
        assert client.metadata()


def test_keys_work_together_with_tls(adopt: Adopt, tmp_path: Path) -> None:
    """Signed requests over TLS; white addresses are the clients' own, also behind it."""
    group = adopt(SecuredGroup(tmp_path / "tls", tls=True))
    group.rules.write(RULES + "- accessKey: local\n  whiteRemoteAddress: 127.0.0.*\n  topicPerms:\n  - default=PUB\n")
    group.start_all()
    group.leader()
    with unharmed(group):
        wrong_secret = ClientSecurity(access_key="alice", secret_key="wrong-secret")
        refused = pytest.raises(AccessDeniedError, match="unknown access key, or")
        with closing(group.client(security=wrong_secret)) as wrong, refused:
            wrong.append(b"x")
        with closing(group.client(security=ClientSecurity(access_key="local", secret_key="not-asked"))) as local:
            local.append(b"from here")
            with pytest.raises(
                AccessDeniedError, match="local is not allowed to do this: Read needs SUB on topic default"
            ):
                local.read(0)
        group.rules.write(RULES + "globalWhiteRemoteAddresses:\n- 127.0.0.1\n")
        with closing(group.client(security=NOBODY)) as nobody:
            wait_until(lambda: allowed(lambda: nobody.read(0)), "the address is trusted")


def test_health_is_open_and_reflection_is_closed(secured: SecuredGroup) -> None:
    """Whoever watches a node has no key; a list of methods is for those who have none to keep."""
    with grpc.insecure_channel(secured.nodes[secured.leader()].grpc_address) as channel:
        asked = health_pb2.HealthCheckRequest(service=options.LOG_SERVICE)
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
        listing = channel.stream_stream(f"/{reflection.SERVICE_NAME}/ServerReflectionInfo", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            list(listing(iter([b""]), timeout=60))

    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert ROOT.secret_key not in repr(ROOT)
