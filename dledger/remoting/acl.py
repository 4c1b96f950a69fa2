"""RocketMQ's request signatures: HMAC-SHA1 of the fields' values and the body. Pure.

They contain neither time nor nonce: an intercepted request can be replayed forever, so only TLS protects against that.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from typing import Final

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""Older clients add this field after signing, newer ones sign it; Java's brokers refuse the newer ones."""
_NONE: Final[frozenset[str]] = frozenset()


def signature(secret: str, fields: Mapping[str, str], body: bytes, *, without: frozenset[str] = _NONE) -> str:
    """The signature of all fields but the signature itself and those in ``without``.

    An empty text, which a binary header cannot distinguish from a missing one, adds nothing to the signed text.
    """
    names = sorted(fields) if "".join(fields).isascii() else sorted(fields, key=_as_java_sorts)
    values = [fields[name] for name in names if name != SIGNATURE and name not in without]
    text = "".join(values).encode() + body
    return base64.b64encode(hmac.digest(secret.encode(), text, "sha1")).decode()


def is_signed(secret: str, fields: Mapping[str, str], body: bytes, *, without: frozenset[str] = _NONE) -> bool:
    """Whether the signature is present and matches the secret; compared in constant time.

    ``without``: fields added to the request on its way.
    """
    found = fields.get(SIGNATURE, "").encode()
    matches = hmac.compare_digest(signature(secret, fields, body, without=without).encode(), found)
    if UNIQUE_KEY_QUERY in fields:
        older = signature(secret, fields, body, without=without | {UNIQUE_KEY_QUERY})
        matches |= hmac.compare_digest(older.encode(), found)
    return matches


def signed(
    fields: Mapping[str, str], body: bytes, access_key: str, secret: str, security_token: str = ""
) -> dict[str, str]:
    """The fields of a request, with the access key and the signature."""
    found = {**fields, ACCESS_KEY: access_key}
    if security_token:
        found[SECURITY_TOKEN] = security_token
    found[SIGNATURE] = signature(secret, found, body)
    return found


def _as_java_sorts(name: str) -> bytes:
    """By UTF-16 units, whose order differs from that of characters beyond the basic plane."""
    return name.encode("utf-16-be")
