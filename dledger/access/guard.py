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
from dledger.access.addresses import Address, address_of, any_matches, peer_text
from dledger.access.audit import AuditLog, Event
from dledger.access.permissions import Permission, permission_text
from dledger.access.quota import Limits, Quota, Quotas
from dledger.access.replay import ReplayWindow, TooManySessionsError
from dledger.access.rules import Account, Rules
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


class Kind(StrEnum):
    """What permissions are given on."""

    TOPIC = "topic"
    GROUP = "group"


class Caller:
    """Who makes a call. ``account`` is replaced when the rules change."""

    __slots__ = ("_end", "account", "peer", "quota")

    def __init__(self, account: Account, peer: str, quota: Quota) -> None:
        self.account = account
        self.peer = peer
        self.quota = quota
        self._end: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """For people: the access key, or the trusted address."""
        return self.account.access_key if self.account.access_key != _TRUSTED else "trusted-address"

    def may(self, kind: Kind, name: str, needed: Permission) -> bool:
        """Whether it has this permission: one look into a dictionary."""
        account = self.account
        return bool((account.topic(name) if kind is Kind.TOPIC else account.group(name)) & needed)

    def on_revoked(self, end: Callable[[], None] | None) -> None:
        """What ends the stream of this caller when its key is revoked."""
        self._end = end

    def revoke(self) -> None:
        """End it."""
        if self._end is not None:
            self._end()


class Guard:
    """Lives on the loop, but for ``apply``'s argument, which may come from anywhere. ``limits`` hold per account."""

    def __init__(self, rules: Rules, *, name: str, clock: Clock, limits: Limits, audit: AuditLog | None = None) -> None:
        self.audience = f"{name}.{secrets.token_hex(8)}"
        """What requests to this process are signed for."""
        self.audit = audit or AuditLog()
        self._rules = rules
        self._clock = clock
        self._quotas = Quotas(limits)
        self._seen = ReplayWindow(signing.WINDOW_MS)
        self._open: set[Caller] = set()

    @property
    def rules(self) -> Rules:
        """What holds now."""
        return self._rules

    # --- who ----------------------------------------------------------------------------------------------------------

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]], peer: str, body: bytes | None) -> Caller:
        """Who makes this call (``body`` None: a stream of requests).

        Raises ``NotAuthenticatedError``, ``SessionsFullError``.
        """
        signed = Signed.of(metadata)
        address = address_of(peer)
        try:
            account = self._account(signed, address, method, body)
        except OtherAudienceError:
            raise  # the client does not know us yet: nothing to tell
        except NotAuthenticatedError as error:
            self.audit.denied(Event(signed.access_key[:128], peer_text(peer), _action(method), "", str(error)))
            raise
        return Caller(account, peer_text(peer), self._quotas.of(account.access_key))

    def _account(self, signed: Signed, address: Address | None, method: str, body: bytes | None) -> Account:
        if not signed.access_key:
            if any_matches(self._rules.trusted, address):
                return _EVERYTHING
            raise NotAuthenticatedError("access control is on here: an access key and its secret are needed")
        account = self._rules.accounts.get(signed.access_key)
        if account is not None and any_matches(account.addresses, address):
            return account
        if account is None and any_matches(self._rules.trusted, address):
            return _EVERYTHING
        secret = account.secret if account is not None else b""
        # An unknown key costs the same as a wrong secret, and is told the same.
        genuine = signed.is_genuine(secret or _NOBODYS_SECRET, method, signing.digest_of(body))
        if account is None or not secret or not genuine:
            raise NotAuthenticatedError("the access key is unknown, or the signature was not made with its secret")
        if signed.audience != self.audience:
            raise OtherAudienceError("the request was signed for another server process: sign it again for this one")
        self._check_once(signed)
        return account

    def _check_once(self, signed: Signed) -> None:
        now_ms = self._clock.wall_ms()
        nonce = signing.parse_nonce(signed.nonce)
        if nonce is None or not signed.timestamp.isascii() or not signed.timestamp.isdigit():
            raise NotAuthenticatedError("the timestamp or the nonce of the signature is none")
        timestamp_ms = int(signed.timestamp[:18])
        if abs(now_ms - timestamp_ms) > signing.WINDOW_MS:
            raise NotAuthenticatedError(
                f"the request was signed at {_time(timestamp_ms)}, this server's clock says {_time(now_ms)}: they are "
                f"more than {signing.WINDOW_MS // 60_000} minutes apart; set the clocks"
            )
        session, number = nonce
        try:
            fresh = self._seen.take(signed.access_key, session, number, timestamp_ms, now_ms)
        except TooManySessionsError:
            raise SessionsFullError(
                "too many clients signed requests within the last minutes to remember another one: repeat later, and "
                "keep clients instead of making one per request"
            ) from None
        if not fresh:
            raise NotAuthenticatedError("this signed request came before (or long after later ones): it is a replay")

    # --- whether ------------------------------------------------------------------------------------------------------

    def require(self, caller: Caller, action: str, kind: Kind, name: str, needed: Permission) -> None:
        """Raises ``AccessDeniedError`` unless the caller has the permission."""
        if caller.may(kind, name, needed):
            return
        raise self.denied(caller, action, f"{kind}:{name}", f"needs {permission_text(needed)} on {kind} {name}")

    def require_admin(self, caller: Caller, action: str, resource: str) -> None:
        """Raises ``AccessDeniedError`` unless the caller is an administrator; who is one is noted."""
        if not caller.account.admin:
            raise self.denied(caller, action, resource, "needs an account with admin: true")
        self.note(caller, action, resource)

    def note(self, caller: Caller, action: str, resource: str) -> None:
        """A change that is allowed, for the audit log."""
        self.audit.allowed(Event(caller.name, caller.peer, action, resource))

    def denied(self, caller: Caller, action: str, resource: str, reason: str) -> AccessDeniedError:
        """The error of a refusal, which is in the audit log then."""
        self.audit.denied(Event(caller.name, caller.peer, action, resource, reason))
        return AccessDeniedError(f"{caller.name} may not do this: {action} {reason}")

    # --- streams and changes ------------------------------------------------------------------------------------------

    def enter(self, caller: Caller, end: Callable[[], None]) -> None:
        """A stream of this caller is open until ``leave``; ``end`` is called when its key is revoked."""
        caller.on_revoked(end)
        self._open.add(caller)

    def leave(self, caller: Caller) -> None:
        """It has ended."""
        self._open.discard(caller)
        caller.on_revoked(None)

    def apply(self, rules: Rules) -> None:
        """Decide by these rules from now on, also on open streams."""
        self._rules = rules
        for caller in tuple(self._open):
            before = caller.account
            if before is _EVERYTHING:
                if not any_matches(rules.trusted, _address_in(caller.peer)):
                    caller.revoke()
                continue
            after = rules.accounts.get(before.access_key)
            if after is None or after.secret != before.secret:
                caller.revoke()
            else:
                caller.account = after
                if not after.secret and not any_matches(after.addresses, _address_in(caller.peer)):
                    caller.revoke()
        self._quotas.forget_idle()


_EVERYTHING = Account(_TRUSTED, b"", admin=True)
"""Who calls from a globally white address: RocketMQ asks nothing of him."""
_NOBODYS_SECRET = secrets.token_bytes(32)


def _action(method: str) -> str:
    return method.rpartition("/")[2]


def _address_in(peer: str) -> Address | None:
    return address_of(f"ipv{6 if '[' in peer else 4}:{peer}")


def _time(moment_ms: int) -> str:
    try:
        moment = datetime.fromtimestamp(moment_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{moment_ms} ms"
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
