"""The numbers that any frame may contain: versions, languages, RocketMQ 4.9's response codes, and our announcement.

The errors are of data received over a remoting connection, one class per distinct reaction.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

VERSION: Final = 409
"""V4_9_8, the version that our requests and responses claim; clients infer a broker's features from it."""
PROTOCOL_FIELD: Final = "dledger"
ANNOUNCED: Final = {PROTOCOL_FIELD: "1"}
"""The fields that a server of ours adds to the first answer on each connection. They say that it knows our own request
codes, 20000 to 20099 for the log and 20100 to 20199 for the broker, in this version of the protocol. A client uses none
of them before it has seen this; RocketMQ's clients ignore it.
"""
OUTCOME_FIELD: Final = "outcome"
"""Whether a refused request may have taken effect, in the answers of our brokers: ``not_applied`` or ``unknown``. By
itself, SYSTEM_ERROR leaves it open.
"""
TLS_REQUIRED: Final = {"tls": "required"}
"""The fields of a server's answer, NO_PERMISSION in plaintext, to a client that does not use TLS and must."""


class AnswerCode(IntEnum):
    """Response codes, with RocketMQ's names."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    """Of RocketMQ 5."""
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOWN = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    UPDATE_AND_CREATE_ACL_CONFIG_FAILED = 209
    DELETE_ACL_CONFIG_FAILED = 210
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED = 211
    FLOW_CONTROL = 215
    ILLEGAL_OPERATION = 604
    """Of RocketMQ 5."""


class Language(IntEnum):
    """A program's language; JSON headers contain the name, binary ones the number."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12


LANGUAGES: Final = {one.name: one for one in Language}
"""By name; unknown names are read as ``OTHER``."""


class FrameError(Exception):
    """Raised for invalid frames: nothing after them can be trusted, so the connection is closed."""


class RequestError(Exception):
    """Raised when a request cannot be carried out: the response has ``code``, and the message as its remark."""

    def __init__(self, message: str, code: AnswerCode = AnswerCode.SYSTEM_ERROR) -> None:
        super().__init__(message)
        self.code = code
