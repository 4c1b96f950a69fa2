"""What a producer's name tells: whose it is, and whether anybody comes back under it.

With access control a name is each account's own. Else an account that appends under another one's name would use up its
numbers, and what the other one appends under them would be answered as stored, and be lost.

Names that clients make up begin with a mark, have random digits, and end with their client: nobody repeats anything
under them later. So do those of a stream's tasks, which are done for good once a later batch of their stream has begun:
Spark writes down that a batch is over before it begins the next one. Names that were given, by an application or for a
job's tasks, may come back after any time.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final, NamedTuple

from dledger.core.producer_payload import NAME_BYTES_MAX, check_name

MADE_UP_BYTES: Final = 12
"""Of chance in a name that a client makes up."""
_ACCOUNT_DIGEST_BYTES: Final = 8
_NAME_DIGEST_BYTES: Final = 32
_MADE_UP: Final = re.compile(rf"(?:[0-9a-f]{{{2 * _ACCOUNT_DIGEST_BYTES}}}/)?c-[0-9a-f]{{{2 * MADE_UP_BYTES}}}")
"""An account's own or not."""

_STREAM_TASK: Final = re.compile(
    rf"((?:[0-9a-f]{{{2 * _ACCOUNT_DIGEST_BYTES}}}/)?s-[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})"
    r"-([0-9]{1,18})/[0-9]{1,10}"
)


_ACCOUNT: Final = re.compile(rf"[0-9a-f]{{{2 * _ACCOUNT_DIGEST_BYTES}}}/")


class StreamBatch(NamedTuple):
    """A stream, with its account if names have one, and the number of a batch of it."""

    stream: str
    number: int


def made_up_name(chance: bytes) -> str:
    """The name of a client's own making; ``chance``: ``MADE_UP_BYTES`` random bytes."""
    return f"c-{chance.hex()}"


def is_made_up(name: str) -> bool:
    """Whether a client has made the name up, so that nobody comes back under it once its client is idle."""
    return _MADE_UP.fullmatch(name) is not None


def stream_task_name(query: str, batch: int, partition: int) -> str:
    """The name for what one partition of a stream's batch stores. ``query``: the stream's id, a UUID."""
    return f"s-{query}-{batch}/{partition}"


def stream_batch(name: str) -> StreamBatch | None:
    """The batch whose task a producer is; None if it is no stream's."""
    found = _STREAM_TASK.fullmatch(name)
    return None if found is None else StreamBatch(found[1], int(found[2]))


def account_of(name: str) -> str:
    """What tells an account's names from others'; empty for a name that is no account's."""
    found = _ACCOUNT.match(name)
    return "" if found is None else found[0]


def own_name(account: str, name: str) -> str:
    """The name under which the log knows an account's producer. Raises ``InvalidRequestError``.

    It begins with as many characters for every account, so that no account can choose a name that is another's.
    """
    check_name(name)
    digest = blake2b(account.encode(), digest_size=_ACCOUNT_DIGEST_BYTES).hexdigest()
    if len(digest) + 1 + len(name) > NAME_BYTES_MAX:
        name = blake2b(name.encode(), digest_size=_NAME_DIGEST_BYTES).hexdigest()
    return f"{digest}/{name}"
