"""The request codes of a log's port for clients: DLedger's, with JSON, and ours."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

REQUEST_BYTES_MAX_FIELD: Final = "requestBytesMax"
"""In the header of the answer to DLedger's METADATA: how many bytes the body of an append may have."""


class JavaCode(IntEnum):
    """DLedger's codes, with its names. Their bodies are fastjson's, and the code of an answer is in its body."""

    METADATA = 50000
    APPEND = 50001
    GET = 50002
    LEADERSHIP_TRANSFER = 51005


class LogCode(IntEnum):
    """Our codes; ``codec`` has the bodies of the first two, ``proto/dledger/v1/client.proto`` those of the others.

    An answer has code 0 and a body, or DLedger's response code of an error, and a ``Status`` as its body.
    """

    APPEND = 20000
    READ = 20001
    METADATA = 20002
    PRODUCER = 20003
    TRANSFER = 20004
    WATCH_ROLE = 20005
    """Answered with the present role; changes come as requests of the server, until the connection ends."""
    ROLE_CHANGED = 20006
    """Sent by the server, without an answer."""
    FETCH = 20007
    """Answered with one chunk; who wants more asks for the next one."""
    LOCATE = 20008
    DIGESTS = 20009
    """Answered with the first blocks; who wants more asks from where they end."""
    CHANGE_MEMBERS = 20010
    COMMAND = 20011
    """Of a state machine on the log, as the two below."""
    QUERY = 20012
    SNAPSHOT = 20013
