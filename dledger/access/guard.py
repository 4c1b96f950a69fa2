"""Authenticates and authorizes every call, on a server's event loop.

A call is admitted once (``admit``): its signature, time and nonce are checked, and it gets a ``Caller``. Its operations
are checked against the caller's account (``require``, or ``may`` on the hot path). When the rules change (``apply``),
the callers of open streams get their new permissions, and streams of revoked keys are ended.

Deny by default: nothing is allowed without an account, and an account may do only what its permissions name.

Each signed request is accepted once (``ReplayWindow``): nonces are remembered in bounded memory. A nonce is a client's
session and an increasing number. Of a session the largest number is kept, and which of the ``SPAN`` numbers before it
have been seen (like IPsec's anti-replay window), so a client costs about half a kilobyte however many requests it
makes, and requests of several threads may overtake each other. A session is forgotten only when its newest request is
older than the time window: anything replayed of it is then too old anyway.

Nothing is forgotten earlier. When there is no room for another session it is refused, and one account can take up only
a part of the room, so that it cannot keep the others out. Only authentic requests get here: without a secret nobody can
fill it.

A signed request carries, as metadata:

====================  =========================================================================================
dledger-access-key    the key whose secret signs dledger-timestamp     milliseconds since 1970 at the client
dledger-nonce         ``<session>-<number>``: 16 random hex digits per client, and an increasing number dledger-audience
the server process addressed, by its own name; empty until that is known dledger-signature     HMAC-SHA256, in hex,
under the secret, of the lines below ====================
=========================================================================================

Signed are the lines ``dledger1``, method, access key, timestamp, nonce, audience, digest, joined by newlines; the
digest is the SHA-256 of the request's bytes in hex, or ``-`` where the client sends a stream of requests.

The audience makes a request intercepted on its way to one member worthless at another, and after a restart: each
process chooses a name of its own, and refuses requests signed for another with its own name in the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Final

from dledger.access.addresses import AddressPattern, address_of, any_matches, counted_host, host_of, peer_text
from dledger.access.audit import AuditEvent, AuditLog
from dledger.access.quota import Quota, Quotas
from dledger.access.rules import AccessRules, Account, MakeThread, Permission, RulesFile, permission_text
from dledger.clock import Clock
from dledger.config import AccessConfig
from dledger.errors import AccessDeniedError, PendingFullError

ACCESS_KEY: Final = "dledger-access-key"
TIMESTAMP: Final = "dledger-timestamp"
NONCE: Final = "dledger-nonce"
AUDIENCE: Final = "dledger-audience"
SIGNATURE: Final = "dledger-signature"
REFUSAL: Final = "dledger-access"
"""In the trailing metadata of a refusal: one of the values below."""
DENIED: Final = "denied"
CHALLENGE: Final = "challenge"
"""Signed for another server process: sign again, for the audience named in the refusal."""
BUSY: Final = "busy"

WINDOW_MS: Final = 5 * 60 * 1000
"""How far a client's clock and the server's may be apart; older requests are refused."""
_STREAM_DIGEST: Final = "-"

_NONCE = re.compile(r"([0-9a-f]{16})-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Signed:
    """The claims in a request's metadata, not verified."""

    access_key: str
    timestamp: str
    nonce: str
    audience: str
    signature: str

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Signed:
        """Read the metadata; missing fields are empty."""
        found: dict[str, str] = {key: value for key, value in metadata if isinstance(value, str)}
        return cls(*(found.get(name, "") for name in (ACCESS_KEY, TIMESTAMP, NONCE, AUDIENCE, SIGNATURE)))

    def is_genuine(self, secret: bytes, method: str, digest: str) -> bool:
        """Whether the signature matches the secret; takes constant time."""
        expected = _signature(secret, method, self.access_key, self.timestamp, self.nonce, self.audience, digest)
        return hmac.compare_digest(expected.encode(), self.signature.encode())


def parse_nonce(nonce: str) -> tuple[str, int] | None:
    """Session and number, or None."""
    match = _NONCE.fullmatch(nonce)
    return None if match is None else (match[1], int(match[2]))


def digest_of(body: bytes | None) -> str:
    """The digest of a request's bytes; None: the client sends a stream."""
    return _STREAM_DIGEST if body is None else hashlib.sha256(body).hexdigest()


def _signature(secret: bytes, *parts: str) -> str:
    return hmac.digest(secret, "\n".join(("dledger1", *parts)).encode(), "sha256").hex()


SPAN: Final = 4096
_SESSIONS_MAX: Final = 20_000
_ACCOUNT_SESSIONS_MAX: Final = 5_000


class TooManySessionsError(Exception):
    """Raised when no further session can be remembered."""


@dataclass(slots=True)
class _Session:
    newest_ms: int
    largest: int
    seen: int  # bit n: number `largest - n` has been seen


class ReplayWindow:
    """For one thread at a time."""

    def __init__(
        self,
        window_ms: int,
        *,
        sessions_max: int = _SESSIONS_MAX,
        account_sessions_max: int = _ACCOUNT_SESSIONS_MAX,
    ) -> None:
        self._window_ms = window_ms
        self._sessions_max = sessions_max
        self._account_sessions_max = account_sessions_max
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._by_account: dict[str, int] = {}
        self._swept_ms = 0
        self._horizon_ms = 0  # anything older may be of a forgotten session, even if the clock was set back since

    def __len__(self) -> int:
        return len(self._sessions)

    def take(self, access_key: str, session: str, number: int, timestamp_ms: int, now_ms: int) -> bool:
        """Remember an authentic request whose time was checked; False if it was seen before, or may have been.

        Raises ``TooManySessionsError``.
        """
        if timestamp_ms < self._horizon_ms:
            return False
        key = (access_key, session)
        known = self._sessions.get(key)
        if known is None:
            self._make_room(access_key, now_ms)
            self._sessions[key] = _Session(timestamp_ms, number, 1)
            self._by_account[access_key] = self._by_account.get(access_key, 0) + 1
            return True
        known.newest_ms = max(known.newest_ms, timestamp_ms)
        ahead = number - known.largest
        if ahead > 0:
            known.seen = 1 if ahead >= SPAN else (known.seen << ahead | 1) & _MASK
            known.largest = number
            return True
        bit = 1 << -ahead if ahead > -SPAN else 0
        if not bit or known.seen & bit:
            return False
        known.seen |= bit
        return True

    def _make_room(self, access_key: str, now_ms: int) -> None:
        if not self._is_full(access_key):
            return
        if abs(now_ms - self._swept_ms) >= _SWEEP_INTERVAL_MS:  # a flood of new sessions must not cost a sweep each
            self._swept_ms = now_ms
            self._sweep(now_ms)
        if self._is_full(access_key):
            raise TooManySessionsError

    def _is_full(self, access_key: str) -> bool:
        return (
            len(self._sessions) >= self._sessions_max
            or self._by_account.get(access_key, 0) >= self._account_sessions_max
        )

    def _sweep(self, now_ms: int) -> None:
        self._horizon_ms = max(self._horizon_ms, now_ms - self._window_ms)
        for key in [key for key, one in self._sessions.items() if now_ms > one.newest_ms + self._window_ms]:
            del self._sessions[key]
            self._by_account[key[0]] -= 1
            if not self._by_account[key[0]]:
                del self._by_account[key[0]]


_MASK: Final = (1 << SPAN) - 1
_SWEEP_INTERVAL_MS: Final = 1000


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
        self._seen = ReplayWindow(WINDOW_MS)
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
        account = _proved(account, lambda secret: signed.is_genuine(secret, method, digest_of(body)))
        if signed.audience != self.audience:
            raise OtherAudienceError("the request was signed for another server process: sign it again")
        self._check_once(signed)
        return account, True

    def _check_once(self, signed: Signed) -> None:
        now_ms = self._clock.wall_ms()
        nonce = parse_nonce(signed.nonce)
        if nonce is None or not signed.timestamp.isascii() or not signed.timestamp.isdigit():
            raise NotAuthenticatedError("malformed timestamp or nonce in signature")
        timestamp_ms = int(signed.timestamp[:18])
        if abs(now_ms - timestamp_ms) > WINDOW_MS:
            raise NotAuthenticatedError(
                f"the request was signed at {_time(timestamp_ms)}, but this server's clock reads {_time(now_ms)}: "
                f"more than {WINDOW_MS // 60_000} minutes apart; synchronize the clocks"
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
        """The error for a stream or waiting call ended by a change of the rules, which it records in the audit log."""
        self.audit.denied(AuditEvent(caller.name, caller.peer, "Stream", "", why))
        return AccessDeniedError(f"ended a call of {caller.name}: {why}")

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
