"""RocketMQ's signatures of requests: HMAC-SHA1 of the fields' values and the body. Pure.

They hold neither time nor nonce: a request that was overheard can be sent again for ever, so that only TLS protects it.
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
"""Older clients add this field behind the signature's back, newer ones sign it; Java's brokers refuse the newer."""
_SIGNATURE_ONLY: Final = frozenset({SIGNATURE})
_NONE: Final[frozenset[str]] = frozenset()


def signature(secret: str, fields: Mapping[str, str], body: bytes, *, without: frozenset[str] = _NONE) -> str:
    """Of all fields but the signature and those in ``without``.

    An empty text, which a binary header cannot tell from a missing one, adds nothing to the text that is signed.
    """
    names = fields.keys() - (without | _SIGNATURE_ONLY if without else _SIGNATURE_ONLY)
    ordered = sorted(names) if "".join(names).isascii() else sorted(names, key=_as_java_sorts)
    text = "".join([fields[name] for name in ordered]).encode() + body
    return base64.b64encode(hmac.digest(secret.encode(), text, "sha1")).decode()


def is_signed(secret: str, fields: Mapping[str, str], body: bytes, *, without: frozenset[str] = _NONE) -> bool:
    """Whether the signature is there and that of this secret; the time it takes does not tell how much of it is.

    ``without``: fields that were added to the request on its way.
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
    """The fields of a request, with the key's name and the signature."""
    found = {**fields, ACCESS_KEY: access_key}
    if security_token:
        found[SECURITY_TOKEN] = security_token
    found[SIGNATURE] = signature(secret, found, body)
    return found


def _as_java_sorts(name: str) -> bytes:
    """By UTF-16 units: beyond the basic plane their order is not that of characters."""
    return name.encode("utf-16-be")
