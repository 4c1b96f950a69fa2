"""Authenticates and authorizes every request on remoting connections to a log, before anything else.

Each request is checked anew, by the current rules. Remembered are only who asked last on a connection, until the rules
change, and whom to hang up on when its key is revoked.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from dledger.access.guard import AccessGuard, Caller, quota_of
from dledger.access.quota import Quota
from dledger.access.rules import AccessRules
from dledger.remoting.acl import ACCESS_KEY, is_signed
from dledger.remoting.connection import Place, RemotingConnection
from dledger.remoting.frame import Frame
from dledger.rpc.clients.log_requests import LogOperation, LogRequests


class Admitted(NamedTuple):
    """An admitted request: of whom (None without access control), and what that client may occupy."""

    caller: Caller | None
    quota: Quota


class _Known(NamedTuple):
    """The account that asked last on a connection, and the rules that applied."""

    rules: AccessRules
    key: str
    caller: Caller
    secret: str


class LogAccess:
    """On the loop. Without a guard, everybody may do everything."""

    def __init__(self, requests: LogRequests) -> None:
        self._requests = requests
        self._guard = requests.guard
        self._known: dict[RemotingConnection, _Known] = {}
        self._callers: dict[RemotingConnection, dict[str, Caller]] = {}  # by access key

    def admit(self, connection: RemotingConnection, frame: Frame, operation: LogOperation) -> Admitted:
        """Raises ``AccessDeniedError`` unless the caller may do this."""
        guard, host = self._guard, connection.counted_as
        if guard is None:
            return Admitted(None, self._requests.quotas.of(f"@{host}", host, str(connection.place)))
        caller = self._caller(guard, connection, frame, operation)
        self._requests.require(guard, caller, operation, operation)
        self._stand(guard, connection, caller)
        # The caller is remembered, but a quota is forgotten while it counts nothing: one of its account's connections
        # would have limits of its own.
        return Admitted(caller, quota_of(caller.account, caller.grpc_peer, self._requests.quotas))

    def admit_again(self, admitted: Admitted, operation: LogOperation) -> None:
        """The same for a request that has waited."""
        guard, caller = self._guard, admitted.caller
        if guard is not None and caller is not None:
            guard.renew(caller, operation)
            self._requests.require(guard, caller, operation, operation)

    def closed(self, connection: RemotingConnection) -> None:
        """A client is gone."""
        self._known.pop(connection, None)
        for caller in self._callers.pop(connection, {}).values():
            if self._guard is not None:
                self._guard.leave(caller)

    def _caller(
        self, guard: AccessGuard, connection: RemotingConnection, frame: Frame, operation: LogOperation
    ) -> Caller:
        """Each signature is verified; addresses once per connection, as long as the rules are the same."""
        fields, rules = frame.fields, guard.rules
        key = fields.get(ACCESS_KEY, "")
        known = self._known.get(connection)
        if (
            known is not None
            and known.rules is rules
            and known.key == key
            and (not known.caller.signed or is_signed(known.secret, fields, frame.body))
        ):
            return known.caller

        def is_genuine(secret: bytes) -> bool:
            return is_signed(secret.decode(), fields, frame.body)

        peers = (peer_of(connection.place),)
        caller = guard.admit_signed(operation, key, peers, is_genuine, self._requests.quotas)
        if not connection.is_closed:
            self._known[connection] = _Known(rules, key, caller, caller.account.secret.decode())
        return caller

    def _stand(self, guard: AccessGuard, connection: RemotingConnection, caller: Caller) -> None:
        """Remember whom to hang up on."""
        if connection.is_closed:
            return
        here = self._callers.setdefault(connection, {})
        key = caller.account.access_key
        if key not in here:
            here[key] = caller
            guard.enter(caller, partial(self._end, guard, connection, caller), lambda: True)

    def _end(self, guard: AccessGuard, connection: RemotingConnection, caller: Caller, why: str) -> None:
        connection.close(str(guard.ended(caller, why)))


def peer_of(place: Place) -> str:
    """A client's address as gRPC names it, and so the rules and the audit log."""
    return f"ipv6:[{place.host}]:{place.port}" if ":" in place.host else f"ipv4:{place.host}:{place.port}"
