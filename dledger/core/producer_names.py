"""Whose a producer's name is: with access control, each account's own.

Else an account that appends under another one's name would use up its numbers, and what the other one appends under
them would be answered as stored, and be lost.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from dledger.core.producer_payload import NAME_BYTES_MAX, check_name

_ACCOUNT_DIGEST_BYTES: Final = 8
_NAME_DIGEST_BYTES: Final = 32


def own_name(account: str, name: str) -> str:
    """The name under which the log knows an account's producer. Raises ``InvalidRequestError``.

    It begins with as many characters for every account, so that no account can choose a name that is another's.
    """
    check_name(name)
    digest = blake2b(account.encode(), digest_size=_ACCOUNT_DIGEST_BYTES).hexdigest()
    if len(digest) + 1 + len(name) > NAME_BYTES_MAX:
        name = blake2b(name.encode(), digest_size=_NAME_DIGEST_BYTES).hexdigest()
    return f"{digest}/{name}"
