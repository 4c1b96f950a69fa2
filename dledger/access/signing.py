"""The signature of requests. A request carries, as metadata:

====================  =========================================================================================
dledger-access-key    the key whose secret signs
dledger-timestamp     milliseconds since 1970 at the client
dledger-nonce         ``<session>-<number>``: 16 random hex digits per client, and an increasing number
dledger-audience      the server process addressed, by its own name; empty until that is known
dledger-signature     HMAC-SHA256, in hex, under the secret, of the lines below
====================  =========================================================================================

Signed are the lines ``dledger1``, method, access key, timestamp, nonce, audience, digest, joined by newlines; the
digest is the SHA-256 of the request's bytes in hex, or ``-`` where the client sends a stream of requests.

The audience makes a request intercepted on its way to one member worthless at another, and after a restart: each
process chooses a name of its own, and refuses requests signed for another with its own name in the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

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
STREAM_DIGEST: Final = "-"

_NONCE = re.compile(r"([0-9a-f]{16})-(\d{1,18})")
_AUDIENCES_MAX: Final = 1024


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
    return STREAM_DIGEST if body is None else hashlib.sha256(body).hexdigest()


def _signature(secret: bytes, *parts: str) -> str:
    return hmac.digest(secret, "\n".join(("dledger1", *parts)).encode(), "sha256").hex()


class Signer:
    """Signs one client's requests, repeated ones anew. Thread-safe."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        self._access_key = access_key
        self._secret = secret_key.encode()
        self._session = secrets.token_hex(8)
        self._numbers = itertools.count(1)  # next() is atomic
        self._lock = threading.Lock()  # guards changes of _audiences
        self._audiences: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Signer({self._access_key!r})"

    def sign(self, method: str, address: str, body: bytes | None) -> tuple[tuple[str, str], ...]:
        """Metadata for one call at ``address``; ``body`` None: a stream of requests."""
        timestamp = str(time.time_ns() // 1_000_000)
        nonce = f"{self._session}-{next(self._numbers)}"
        audience = self._audiences.get(address, "")
        key = self._access_key
        signature = _signature(self._secret, method, key, timestamp, nonce, audience, digest_of(body))
        return (
            (ACCESS_KEY, key),
            (TIMESTAMP, timestamp),
            (NONCE, nonce),
            (AUDIENCE, audience),
            (SIGNATURE, signature),
        )

    def learn(self, address: str, told: Mapping[str, str]) -> bool:
        """Take a refusal's trailing metadata; returns whether it asks to sign again, for the audience that it names."""
        if told.get(REFUSAL) != CHALLENGE or not told.get(AUDIENCE):
            return False
        with self._lock:
            if len(self._audiences) >= _AUDIENCES_MAX:
                self._audiences.clear()
            self._audiences[address] = told[AUDIENCE]
        return True
