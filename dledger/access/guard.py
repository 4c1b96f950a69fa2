"""Authenticates and authorizes every call, on a server's event loop.

A call is admitted once (``admit``): its signature, time and nonce are checked, and it gets a ``Caller``. Its operations
are checked against the caller's account (``require``, or ``may`` on the hot path). When the rules change (``apply``),
the callers of open streams get their new permissions, and streams of revoked keys are ended.

Deny by default: nothing is allowed without an account, and an account may do only what its permissions name.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial

from dledger.access import signing
from dledger.access.addresses import AddressPattern, address_of, any_matches, counted_host, host_of, peer_text
from dledger.access.audit import AuditEvent, AuditLog
from dledger.access.quota import Quota, Quotas
from dledger.access.replay import ReplayWindow, TooManySessionsError
from dledger.access.rules import AccessRules, Account, Permission, permission_text
from dledger.access.rules_file import MakeThread, RulesFile
from dledger.access.signing import Signed
from dledger.clock import Clock
from dledger.config import AccessConfig
from dledger.errors import AccessDeniedError, PendingFullError

_TRUSTED = "-"
"""The access key of callers who need none."""
_log = logging.getLogger("dledger.access")


class NotAuthenticatedError(AccessDeniedError):
    """Raised when the caller is not authenticated."""


class OtherAudienceError(NotAuthenticatedError):
    """Raised when a request was signed for another server process: the client signs again."""


class SessionsFullError(PendingFullError):
    """Raised when no further client can be remembered; none is forgotten instead."""


class ResourceKind(StrEnum):
    """The kinds of resources that permissions are granted on."""

    TOPIC = "topic"
    GROUP = "group"


class Caller:
    """The caller of a call. ``account`` is replaced when the rules change."""

    __slots__ = ("account", "grpc_peer", "quota", "signed")

    def __init__(self, account: Account, grpc_peer: str, quota: Quota, *, signed: bool) -> None:
        self.account = account
        self.grpc_peer = grpc_peer
        self.quota = quota
        self.signed = signed

    @property
    def peer(self) -> str:
        """The caller's address, for people."""
        return peer_text(self.grpc_peer)

    @property
    def name(self) -> str:
        """The access key or the trusted address, for people."""
        return self.account.access_key if self.account.access_key != _TRUSTED else "trusted-address"

    def may(self, kind: ResourceKind, name: str, needed: Permission) -> bool:
        """Whether the caller has this permission: one dictionary lookup."""
        account = self.account
        permission = account.topic(name) if kind is ResourceKind.TOPIC else account.group(name)
        return int(permission) & int(needed) != 0  # ``&`` of flags takes a microsecond


class AccessGuard:
    """Lives on the loop. ``name`` is for people; each process gets its own ``audience``."""

    def __init__(self, rules: AccessRules, *, name: str, clock: Clock) -> None:
        self.audience = f"{name}.{secrets.token_hex(8)}"
        """The audience for which requests to this process must be signed."""
        self.audit = AuditLog()
        self._rules = rules
        self._clock = clock
        self._seen = ReplayWindow(signing.WINDOW_MS)
        self._open: dict[Caller, tuple[Callable[[str], None], Callable[[], bool]]] = {}

    @property
    def rules(self) -> AccessRules:
        return self._rules

    # --- authentication -----------------------------------------------------------------------------------------------

    def admit(
        self,
        method: str,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: str,
        body: bytes | None,
        quotas: Quotas,
    ) -> Caller:
        """Authenticate a call (``body`` None: a stream of requests); ``quotas`` are those of the service called.

        Raises ``NotAuthenticatedError``, ``SessionsFullError``.
        """
        signed = Signed.of(metadata)
        try:
            account, proved = self._account(signed, peer, method, body)
        except OtherAudienceError:
            raise  # the client does not know us yet: nothing to report
        except (NotAuthenticatedError, SessionsFullError) as error:
            self.audit.denied(AuditEvent(_claimed(signed.access_key), peer_text(peer), _action(method), "", str(error)))
            raise
        return Caller(account, peer, quota_of(account, peer, quotas), signed=proved)

    def admit_signed(
        self,
        action: str,
        access_key: str,
        peers: tuple[str, ...],
        is_genuine: Callable[[bytes], bool],
        quotas: Quotas,
    ) -> Caller:
        """Authenticate a request of a protocol with signatures of its own, which ``is_genuine`` checks by the secret.

        ``peers`` are where it came from and, if somebody passed it on, from where: a white list must include both,
        because the first is only what the second says. Raises ``NotAuthenticatedError``.
        """
        try:
            account, proved = self._account_of_key(access_key, peers, is_genuine)
        except NotAuthenticatedError as error:
            self.audit.denied(AuditEvent(_claimed(access_key), peer_text(peers[0]), action, "", str(error)))
            raise
        return Caller(account, peers[0], quota_of(account, peers[0], quotas), signed=proved)

    def _account_of_key(
        self, access_key: str, peers: tuple[str, ...], is_genuine: Callable[[bytes], bool]
    ) -> tuple[Account, bool]:
        """As in RocketMQ, a globally white-listed address needs nothing, and a key it may send does not matter."""
        rules = self._rules
        if rules.trusted and all(_is_among(rules.trusted, one) for one in peers):
            return _EVERYTHING, False
        if not access_key:
            raise NotAuthenticatedError(_KEY_NEEDED)
        account = rules.accounts.get(access_key)
        if account is not None and account.addresses and all(_is_among(account.addresses, one) for one in peers):
            return account, False
        return _proved(account, is_genuine), True

    def _account(self, signed: Signed, peer: str, method: str, body: bytes | None) -> tuple[Account, bool]:
        """The call's account, and whether a signature proves it (otherwise the address)."""
        if not signed.access_key:
            if _is_among(self._rules.trusted, peer):
                return _EVERYTHING, False
            raise NotAuthenticatedError(_KEY_NEEDED)
        account = self._rules.accounts.get(signed.access_key)
        if account is not None and _is_among(account.addresses, peer):
            return account, False
        if account is None and _is_among(self._rules.trusted, peer):
            return _EVERYTHING, False
        account = _proved(account, lambda secret: signed.is_genuine(secret, method, signing.digest_of(body)))
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

    # --- authorization ------------------------------------------------------------------------------------------------

    def require(self, caller: Caller, action: str, kind: ResourceKind, name: str, needed: Permission) -> None:
        """Raise ``AccessDeniedError`` unless the caller has the permission."""
        if caller.may(kind, name, needed):
            return
        raise self.denied(caller, action, f"{kind}:{name}", f"needs {permission_text(needed)} on {kind} {name}")

    def require_admin(self, caller: Caller, action: str, resource: str, *, changes: bool = True) -> None:
        """Raise ``AccessDeniedError`` unless the caller is an administrator; ``changes`` are recorded."""
        if not caller.account.admin:
            raise self.denied(caller, action, resource, "requires an account with admin: true")
        if changes:
            self.note(caller, action, resource)

    def note(self, caller: Caller, action: str, resource: str) -> None:
        """Record an allowed change in the audit log."""
        self.audit.allowed(AuditEvent(caller.name, caller.peer, action, resource))

    def denied(self, caller: Caller, action: str, resource: str, reason: str) -> AccessDeniedError:
        """The error for a refusal, which it records in the audit log."""
        self.audit.denied(AuditEvent(caller.name, caller.peer, action, resource, reason))
        return AccessDeniedError(f"{caller.name} is not allowed to do this: {action} {reason}")

    def ended(self, caller: Caller, why: str) -> AccessDeniedError:
        """The error for a stream ended by a change of the rules, which it records in the audit log."""
        self.audit.denied(AuditEvent(caller.name, caller.peer, "Stream", "", why))
        return AccessDeniedError(f"closed the stream of {caller.name}: {why}")

    # --- streams and changes ------------------------------------------------------------------------------------------

    def enter(self, caller: Caller, end: Callable[[str], None], still_allowed: Callable[[], bool]) -> None:
        """Register an open stream of this caller until ``leave``.

        ``end`` is called with the reason when new rules revoke its key, or when ``still_allowed`` returns False under
        them.
        """
        self._open[caller] = (end, still_allowed)

    def leave(self, caller: Caller) -> None:
        """The stream has ended."""
        self._open.pop(caller, None)

    def apply(self, rules: AccessRules) -> None:
        """Replace the rules, also for open streams."""
        self._rules = rules
        for caller, (end, still_allowed) in tuple(self._open.items()):
            if not self._is_known(caller):
                end("access key revoked")
            elif not still_allowed():
                end("permission revoked")

    def renew(self, caller: Caller, action: str) -> None:
        """Give a caller that waited its current account. Raises ``AccessDeniedError`` if there is none any more."""
        if not self._is_known(caller):
            raise self.denied(caller, action, "", "any more: access key revoked")

    def _is_known(self, caller: Caller) -> bool:
        """Whether the caller would be admitted under the current rules; updates its account."""
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
"""The account of callers from globally white-listed addresses, of whom RocketMQ requires nothing."""
_NOBODYS_SECRET = secrets.token_hex(32).encode()
_KEY_NEEDED = "this server requires an access key and its secret"


def _proved(account: Account | None, is_genuine: Callable[[bytes], bool]) -> Account:
    """The account that a key names, if its secret signed. Raises ``NotAuthenticatedError``.

    An unknown key takes the same time as a wrong secret, and gets the same answer.
    """
    secret = account.secret if account is not None else b""
    genuine = is_genuine(secret or _NOBODYS_SECRET)
    if account is None or not secret or not genuine:
        raise NotAuthenticatedError("unknown access key, or the signature does not match its secret")
    return account


def quota_of(account: Account, peer: str, quotas: Quotas) -> Quota:
    """The account's quota; callers without an account share that of their address."""
    if account is _EVERYTHING:
        return quota_at(host_of(peer), peer, quotas)
    return quotas.of(account.access_key, account.access_key, peer)


def quota_at(host: str, peer: str, quotas: Quotas) -> Quota:
    """The quota of a connection known only by its address."""
    host = counted_host(host)
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


def _claimed(access_key: str) -> str:
    """The claimed access key, for the audit log."""
    return f"{access_key[:128]}?" if access_key else ""


class AccessControl:
    """Access control of one server, built from its settings: the guard, and the rules file that it follows.

    Created by ``of``; ``start`` it once there is an event loop, ``close`` ends its thread.
    """

    def __init__(self, file: RulesFile, guard: AccessGuard, name: str) -> None:
        self.guard = guard
        self._name = name
        self._file = file

    @classmethod
    def of(cls, config: AccessConfig, *, name: str, clock: Clock) -> AccessControl | None:
        """None if it is off.

        Raises ``ConfigError`` for rules that cannot be used: nothing may be open by mistake.
        """
        if not config.acl_enable or config.acl_file is None:
            if config.acl_file is not None:
                _log.warning(
                    "acl_file is set but acl_enable is not true: access control is off, every client may do everything"
                )
            return None
        file = RulesFile(config.acl_file)
        return cls(file, AccessGuard(file.rules, name=name, clock=clock), name)

    def start(self, post: Callable[[Callable[[], None]], None], thread: MakeThread) -> None:
        """Follow the file on a thread; ``post`` runs something on the guard's event loop."""

        def changed(rules: AccessRules) -> None:
            post(partial(self.guard.apply, rules))

        self._file.start(thread, self._name, changed, self.guard.audit)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._file.close()
