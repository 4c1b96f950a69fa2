"""Who may do what with a log over remoting: signatures, permissions, revoked keys, and the audit log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dledger.access.guard import AccessGuard
from dledger.access.rules import parse_rules
from dledger.clock import Clock
from dledger.config import ReplicationConfig, ServerConfig
from dledger.errors import AccessDeniedError
from dledger.remoting.frame import Frame, encode, signed
from dledger.remoting.log_codec import JavaCode, LogCode
from dledger.rpc.clients import codec as messages
from dledger.rpc.clients.log_requests import NEEDED, LogOperation
from dledger.types import ProducerBatch
from tests.support.fake_node import FakeNode
from tests.support.waiting import wait_until
from tests.unit.dledger.remoting.log.harness import GROUP, Served, append, append_body, appended, error_in, served

RULES = """\
accounts:
- accessKey: caller
  secretKey: caller-secret
  topicPerms:
  - default={}
- accessKey: root
  secretKey: root-secret
  admin: true
"""
KEY = ("caller", "caller-secret")
ROOT = ("root", "root-secret")
OPERATIONS: dict[LogCode | JavaCode, LogOperation] = {
    LogCode.APPEND: LogOperation.APPEND,
    LogCode.READ: LogOperation.READ,
    LogCode.METADATA: LogOperation.METADATA,
    LogCode.PRODUCER: LogOperation.PRODUCER,
    LogCode.TRANSFER: LogOperation.TRANSFER,
    LogCode.CHANGE_MEMBERS: LogOperation.CHANGE_MEMBERS,
    LogCode.COMMAND: LogOperation.COMMAND,
    LogCode.QUERY: LogOperation.QUERY,
    LogCode.SNAPSHOT: LogOperation.SNAPSHOT,
    LogCode.WATCH_ROLE: LogOperation.WATCH_ROLE,
    LogCode.FETCH: LogOperation.FETCH,
    LogCode.LOCATE: LogOperation.LOCATE,
    LogCode.DIGESTS: LogOperation.DIGESTS,
    JavaCode.METADATA: LogOperation.METADATA,
    JavaCode.APPEND: LogOperation.APPEND,
    JavaCode.GET: LogOperation.READ,
    JavaCode.LEADERSHIP_TRANSFER: LogOperation.TRANSFER,
}


@contextmanager
def guarded(permission: str, config: ServerConfig | None = None) -> Iterator[tuple[Served, Callable[[str], object]]]:
    """A node with an account that has ``permission`` on its log, and an administrator; and what changes the rules."""
    guard = AccessGuard(parse_rules(RULES.format(permission)), name="n0", clock=Clock())
    with served(config, FakeNode(), guard) as serving:
        yield serving, lambda text: serving.server.bridge.post(lambda: guard.apply(parse_rules(text)))


def is_denied(serving: Served, code: LogCode | JavaCode, key: tuple[str, str] | None) -> bool:
    """Whether a request without a valid body is refused for lack of a permission."""
    with serving.dial(key=key) as client:
        answer = client.ask(code)
        if isinstance(code, JavaCode):
            return bool(json.loads(answer.body)["code"] == 16)
        return bool(answer.code) and isinstance(error_in(answer), AccessDeniedError)


@pytest.mark.parametrize("permission", ["DENY", "PUB", "SUB", "PUB|SUB"])
def test_each_code_needs_the_permission_of_its_operation(permission: str) -> None:
    """The same as over gRPC: writers do not read, readers do not write, and neither moves the leadership."""
    with guarded(permission) as (serving, _):
        denied = {code for code in OPERATIONS if is_denied(serving, code, KEY)}
        assert not any(is_denied(serving, code, ROOT) for code in OPERATIONS)

    granted = permission.split("|")
    assert denied == {
        code
        for code, operation in OPERATIONS.items()
        if operation in (LogOperation.TRANSFER, LogOperation.CHANGE_MEMBERS, LogOperation.SNAPSHOT)
        or (operation in NEEDED and NEEDED[operation].name not in granted)
    }


@pytest.mark.parametrize("key", [None, ("caller", "wrong"), ("nobody", "caller-secret")])
@pytest.mark.parametrize("code", OPERATIONS)
def test_nothing_is_done_for_who_has_not_signed(code: LogCode | JavaCode, key: tuple[str, str] | None) -> None:
    """Whatever it is: an unknown key and a wrong secret look alike."""
    with guarded("PUB|SUB") as (serving, _):
        assert is_denied(serving, code, key)


def test_a_changed_body_is_refused() -> None:
    """The signature covers it."""
    with guarded("PUB|SUB") as (serving, _), serving.dial(key=KEY) as client:
        append(client, b"a")
        fields = signed({}, append_body(b"b"), *KEY)
        client.socket.sendall(encode(Frame(LogCode.APPEND, 7, fields, append_body(b"c"))))
        assert isinstance(error_in(client.answer_to(7)), AccessDeniedError)
    assert serving.node.batches == [(b"a",)]


def test_an_account_has_producers_of_its_own() -> None:
    """Two accounts may use the same name."""
    with guarded("PUB|SUB") as (serving, _):
        for key in (KEY, ROOT):
            with serving.dial(key=key) as client:
                batch = appended(client.ask(LogCode.APPEND, body=append_body(b"a", producer=ProducerBatch("p", 0, 1))))
                assert not batch.duplicates
                asked = client.ask(LogCode.PRODUCER, body=messages.encode_producer_request(GROUP, "p"))
                assert messages.decode_producer_answer(asked.body) == 1


def test_a_connection_that_was_idle_counts_for_its_account_again() -> None:
    """Quotas that count nothing are forgotten when there are many."""
    with guarded("PUB|SUB") as (serving, _), serving.dial(key=KEY) as idle, serving.dial(key=KEY) as other:
        requests = serving.server._requests["default"]
        idle.ask(LogCode.READ)
        serving.server.bridge.post(requests.quotas.forget_idle)  # before the next request
        for client in (idle, other):
            assert client.ask(LogCode.WATCH_ROLE).code == 0
        assert [requests.quotas._owners[KEY[0]].streams, requests.quotas.root.streams] == [{"watch": 2}] * 2


def test_a_revoked_key_ends_its_connections() -> None:
    """With its watch: nothing is told to it any more."""
    with guarded("PUB|SUB") as (serving, change), serving.dial(key=KEY) as client, serving.dial(key=ROOT) as root:
        assert client.ask(LogCode.WATCH_ROLE).code == 0
        assert root.ask(LogCode.METADATA).code == 0
        change(RULES.format("SUB").replace("caller-secret", "another-secret"))
        assert client.is_hung_up
        assert root.ask(LogCode.METADATA).code == 0


def test_a_permission_withdrawn_meanwhile_counts_for_what_waits() -> None:
    """An append that waits for room is not stored without it."""
    config = ServerConfig(client_port=0, replication=ReplicationConfig(pending_entries_max=8))
    with guarded("PUB|SUB", config) as (serving, change), serving.dial(key=KEY) as client:
        serving.node.hold = True
        opaques = [client.begin(LogCode.APPEND, body=append_body(b"%d" % number)) for number in range(20)]
        wait_until(lambda: len(serving.node.held) >= 2, "the first ones were submitted")
        change(RULES.format("SUB"))
        with serving.dial(key=KEY) as other:
            wait_until(lambda: bool(other.ask(LogCode.APPEND).code == 16), "the rules are changed")
        serving.node.hold = False
        serving.node.release()
        answers = [client.answer_to(opaque) for opaque in opaques]
    stored = [one for one in answers if not one.code]
    assert [one.code for one in answers] == [0] * len(stored) + [16] * (20 - len(stored))
    assert 2 <= len(stored) == len(serving.node.batches) < 20


def test_transfers_and_refusals_are_in_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    """With the account, its address and the operation."""
    caplog.set_level(logging.INFO, "dledger.audit")
    with guarded("PUB") as (serving, _):
        with serving.dial(key=ROOT) as client:
            client.ask(LogCode.TRANSFER, body=messages.encode_transfer(GROUP, None))
        assert is_denied(serving, LogCode.READ, KEY)
    lines = caplog.text
    assert "TransferLeadership" in lines
    assert "root" in lines
    assert "Read" in lines
    assert "caller" in lines
