"""Accepts each signed request once: remembers nonces in bounded memory.

A nonce is a client's session and an increasing number. Of a session the largest number is kept, and which of the
``SPAN`` numbers before it have been seen (like IPsec's anti-replay window), so a client costs about half a kilobyte
however many requests it makes, and requests of several threads may overtake each other. A session is forgotten only
when its newest request is older than the time window: anything replayed of it is then too old anyway.

Nothing is forgotten earlier. When there is no room for another session it is refused, and one account can take up only
a part of the room, so that it cannot keep the others out. Only authentic requests get here: without a secret nobody can
fill it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SPAN: Final = 4096
SESSIONS_MAX: Final = 20_000
ACCOUNT_SESSIONS_MAX: Final = 5_000


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
        sessions_max: int = SESSIONS_MAX,
        account_sessions_max: int = ACCOUNT_SESSIONS_MAX,
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
