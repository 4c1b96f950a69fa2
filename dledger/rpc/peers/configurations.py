"""A configuration between members: its entry's index and term, and the payload that the entry has."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from typing import Final

from dledger.core.membership_payload import CONFIGURATION_BYTES_MAX, decode_configuration, encode_configuration
from dledger.core.noop_payload import UnreadablePayloadError
from dledger.errors import InvalidRequestError
from dledger.members import MEMBERS_MAX, Configuration
from dledger.rpc.fields import NUMBER_LIMIT
from dledger.types import LogIndex, Term

_ENTRY: Final = Struct(">qq")
BYTES_MAX: Final = _ENTRY.size + CONFIGURATION_BYTES_MAX


def encode(configuration: Configuration | None) -> bytes:
    """The bytes of a configuration in the log; none of none."""
    if configuration is None:
        return b""
    return _ENTRY.pack(configuration.index, configuration.term) + encode_configuration(configuration)


def decode(data: bytes | memoryview) -> Configuration | None:
    """The reverse. Raises ``InvalidRequestError``."""
    if not data:
        return None
    if not _ENTRY.size < len(data) <= BYTES_MAX:
        raise InvalidRequestError(f"a configuration of {len(data)} bytes")
    index, term = _ENTRY.unpack_from(data)
    payload = bytes(data[_ENTRY.size :])
    try:
        found = decode_configuration(payload)
    except UnreadablePayloadError as error:
        raise InvalidRequestError(str(error)) from error
    if found is None or encode_configuration(found) != payload:
        raise InvalidRequestError(f"{len(payload)} bytes are no configuration")
    if len(found.members) > MEMBERS_MAX:
        raise InvalidRequestError(f"a configuration of {len(found.members)} members; the limit is {MEMBERS_MAX}")
    if not (0 <= index < NUMBER_LIMIT and 0 <= term < NUMBER_LIMIT):
        raise InvalidRequestError(f"a configuration at entry {index} of term {term} is impossible")
    return replace(found, index=LogIndex(index), term=Term(term))
