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
import re
from collections.abc import Iterable
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
