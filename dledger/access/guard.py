"""Who calls, and whether he may: every decision about access, on the event loop of a server.

A call is admitted once (``admit``): its signature, time and nonce are checked, and it gets a ``Caller``. What it asks
for is checked against the caller's account (``require``, or ``may`` on the hot path). When the rules change
(``apply``), the callers of open streams get their new permissions, and whose key was revoked is ended.

Deny by default: without an account there is nothing, and an account may do what its permissions name.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum

from dledger.access import signing
from dledger.access.addresses import AddressPattern, address_of, any_matches, host_of, peer_text
from dledger.access.audit import AuditEvent, AuditLog
from dledger.access.permissions import Permission, permission_text
from dledger.access.quota import Quota, Quotas
from dledger.access.replay import ReplayWindow, TooManySessionsError
from dledger.access.rules import AccessRules, Account
from dledger.access.signing import Signed
from dledger.clock import Clock
from dledger.errors import AccessDeniedError, PendingFullError

_TRUSTED = "-"
"""The access key of who needs none."""


class NotAuthenticatedError(AccessDeniedError):
    """Raised when it is not proved who calls."""


class OtherAudienceError(NotAuthenticatedError):
    """Raised when a request was signed for another server process: the client signs again."""


class SessionsFullError(PendingFullError):
    """Raised when no further client can be remembered; nobody is forgotten instead."""


class ResourceKind(StrEnum):
    """What permissions are given on."""

    TOPIC = "topic"
    GROUP = "group"


class Caller:
    """Who makes a call. ``account`` is replaced when the rules change."""

    __slots__ = ("account", "grpc_peer", "quota", "signed")

    def __init__(self, account: Account, grpc_peer: str, quota: Quota, *, signed: bool) -> None:
        self.account = account
        self.grpc_peer = grpc_peer
        self.quota = quota
        self.signed = signed

    @property
    def peer(self) -> str:
        """Its address, for people."""
        return peer_text(self.grpc_peer)

    @property
    def name(self) -> str:
        """For people: the access key, or the trusted address."""
        return self.account.access_key if self.account.access_key != _TRUSTED else "trusted-address"

    def may(self, kind: ResourceKind, name: str, needed: Permission) -> bool:
        """Whether it has this permission: one look into a dictionary."""
        account = self.account
        return bool((account.topic(name) if kind is ResourceKind.TOPIC else account.group(name)) & needed)


class AccessGuard:
    """Lives on the loop. ``name`` is for people; each process gets an ``audience`` of its own."""

    def __init__(self, rules: AccessRules, *, name: str, clock: Clock) -> None:
        self.audience = f"{name}.{secrets.token_hex(8)}"
        """What requests to this process are signed for."""
        self.audit = AuditLog()
        self._rules = rules
        self._clock = clock
        self._seen = ReplayWindow(signing.WINDOW_MS)
        self._open: dict[Caller, tuple[Callable[[str], None], Callable[[], bool]]] = {}

    @property
    def rules(self) -> AccessRules:
        """What holds now."""
        return self._rules

    # --- who ----------------------------------------------------------------------------------------------------------

    def admit(
        self,
        method: str,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: str,
        body: bytes | None,
        quotas: Quotas,
    ) -> Caller:
        """Who makes this call (``body`` None: a stream of requests); ``quotas`` are those of the asked service.

        Raises ``NotAuthenticatedError``, ``SessionsFullError``.
        """
        signed = Signed.of(metadata)
        try:
            account, proved = self._account(signed, peer, method, body)
        except OtherAudienceError:
            raise  # the client does not know us yet: nothing to tell
        except (NotAuthenticatedError, SessionsFullError) as error:
            self.audit.denied(AuditEvent(_claimed(signed), peer_text(peer), _action(method), "", str(error)))
            raise
        return Caller(account, peer, _quota_of(account, peer, quotas), signed=proved)

    def _account(self, signed: Signed, peer: str, method: str, body: bytes | None) -> tuple[Account, bool]:
        """Whose call it is, and whether that is proved by a signature (else by the address)."""
        if not signed.access_key:
            if _is_among(self._rules.trusted, peer):
                return _EVERYTHING, False
            raise NotAuthenticatedError("this server requires an access key and its secret")
        account = self._rules.accounts.get(signed.access_key)
        if account is not None and _is_among(account.addresses, peer):
            return account, False
        if account is None and _is_among(self._rules.trusted, peer):
            return _EVERYTHING, False
        secret = account.secret if account is not None else b""
        # An unknown key costs the same as a wrong secret, and is told the same.
        genuine = signed.is_genuine(secret or _NOBODYS_SECRET, method, signing.digest_of(body))
        if account is None or not secret or not genuine:
            raise NotAuthenticatedError("unknown access key, or the signature does not match its secret")
        if signed.audience != self.audience:
            raise OtherAudienceError("the request was signed for another server process: sign it again")
        self._check_once(signed)
        return account, True

    def _check_once(self, signed: Signed) -> None:
        now_ms = self._clock.wall_ms()
        nonce = signing.parse_nonce(signed.nonce)
        if nonce is None or not signed.timestamp.isascii() or not signed.timestamp.isdigit():
            raise NotAuthenticatedError("malformed timestamp or nonce in signature")
        timestamp_ms = int(signed.timestamp[:18])
        if abs(now_ms - timestamp_ms) > signing.WINDOW_MS:
            raise NotAuthenticatedError(
                f"the request was signed at {_time(timestamp_ms)}, but this server's clock reads {_time(now_ms)}: "
                f"more than {signing.WINDOW_MS // 60_000} minutes apart; synchronize the clocks"
            )
        session, number = nonce
        try:
            fresh = self._seen.take(signed.access_key, session, number, timestamp_ms, now_ms)
        except TooManySessionsError:
            raise SessionsFullError(
                "too many clients have signed requests in the last few minutes: retry later, and reuse clients "
                "instead of creating one per request"
            ) from None
        if not fresh:
            raise NotAuthenticatedError(
                "replayed request: its signature was used before, or is older than ones accepted since"
            )

    # --- whether ------------------------------------------------------------------------------------------------------

    def require(self, caller: Caller, action: str, kind: ResourceKind, name: str, needed: Permission) -> None:
        """Raises ``AccessDeniedError`` unless the caller has the permission."""
        if caller.may(kind, name, needed):
            return
        raise self.denied(caller, action, f"{kind}:{name}", f"needs {permission_text(needed)} on {kind} {name}")

    def require_admin(self, caller: Caller, action: str, resource: str, *, changes: bool = True) -> None:
        """Raises ``AccessDeniedError`` unless the caller is an administrator; what he ``changes`` is noted."""
        if not caller.account.admin:
            raise self.denied(caller, action, resource, "requires an account with admin: true")
        if changes:
            self.note(caller, action, resource)

    def note(self, caller: Caller, action: str, resource: str) -> None:
        """A change that is allowed, for the audit log."""
        self.audit.allowed(AuditEvent(caller.name, caller.peer, action, resource))

    def denied(self, caller: Caller, action: str, resource: str, reason: str) -> AccessDeniedError:
        """The error of a refusal, which is in the audit log then."""
        self.audit.denied(AuditEvent(caller.name, caller.peer, action, resource, reason))
        return AccessDeniedError(f"{caller.name} is not allowed to do this: {action} {reason}")

    def ended(self, caller: Caller, why: str) -> AccessDeniedError:
        """The error of a stream that was open when the rules changed, which is in the audit log then."""
        self.audit.denied(AuditEvent(caller.name, caller.peer, "Stream", "", why))
        return AccessDeniedError(f"closed the stream of {caller.name}: {why}")

    # --- streams and changes ------------------------------------------------------------------------------------------

    def enter(self, caller: Caller, end: Callable[[str], None], still_allowed: Callable[[], bool]) -> None:
        """A stream of this caller is open until ``leave``.

        ``end`` is told why when new rules revoke its key, or when ``still_allowed`` says no under them.
        """
        self._open[caller] = (end, still_allowed)

    def leave(self, caller: Caller) -> None:
        """It has ended."""
        self._open.pop(caller, None)

    def apply(self, rules: AccessRules) -> None:
        """Decide by these rules from now on, also on open streams."""
        self._rules = rules
        for caller, (end, still_allowed) in tuple(self._open.items()):
            if not self._is_known(caller):
                end("access key revoked")
            elif not still_allowed():
                end("permission revoked")

    def renew(self, caller: Caller, action: str) -> None:
        """Give a caller that waited its present account. Raises ``AccessDeniedError`` if there is none any more."""
        if not self._is_known(caller):
            raise self.denied(caller, action, "", "any more: access key revoked")

    def _is_known(self, caller: Caller) -> bool:
        """Whether the caller would be let in under the present rules; gives it its present account."""
        before, peer = caller.account, caller.grpc_peer
        if before is _EVERYTHING:
            return _is_among(self._rules.trusted, peer)
        after = self._rules.accounts.get(before.access_key)
        if after is None or after.secret != before.secret:
            return False
        if not caller.signed and not _is_among(after.addresses, peer):
            return False
        caller.account = after
        return True


_EVERYTHING = Account(_TRUSTED, b"", admin=True)
"""Who calls from a globally white address: RocketMQ asks nothing of him."""
_NOBODYS_SECRET = secrets.token_bytes(32)


def _quota_of(account: Account, peer: str, quotas: Quotas) -> Quota:
    """That of the account; whoever needs none shares with those at the same address."""
    if account is _EVERYTHING:
        return quota_at(host_of(peer), peer, quotas)
    return quotas.of(account.access_key, account.access_key, peer)


def quota_at(host: str, peer: str, quotas: Quotas) -> Quota:
    """That of a connection of which only the address is known."""
    return quotas.of(f"@{host}", host, peer)


def _action(method: str) -> str:
    return method.rpartition("/")[2]


def _is_among(patterns: Iterable[AddressPattern], peer: str) -> bool:
    return bool(patterns) and any_matches(patterns, address_of(peer))


def _time(moment_ms: int) -> str:
    try:
        moment = datetime.fromtimestamp(moment_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{moment_ms} ms"
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _claimed(signed: Signed) -> str:
    """Whose key it says it is, for the audit log."""
    return f"{signed.access_key[:128]}?" if signed.access_key else ""
