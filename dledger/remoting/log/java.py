"""DLedger's own requests, as its Java client sends them: JSON in remoting frames.

An answer's frame has code 200 whatever happened; its body has the real code, and the leader as a hint. Where ours
differs from Java: a ``remoteId`` may be missing; ``get`` is linearizable, so it returns no entry that may still be
lost; ``peers`` are the members' addresses for clients. Bodies are answered as fastjson2 writes them (DLedger 0.4), as
arrays of signed numbers, which fastjson reads, too (older lines): up to five bytes for each, which takes time.
"""

from __future__ import annotations

import base64
from array import array
from typing import Any, Final

from dledger.errors import (
    DLedgerError,
    EntryTooLargeError,
    IndexOutOfRangeError,
    InvalidRequestError,
    ResponseCode,
    UnknownMemberError,
)
from dledger.layout import ENTRY_HEADER_BYTES
from dledger.remoting.errors import RequestError
from dledger.remoting.fastjson import dumps_plain, loads
from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, FRAME_BYTES_MAX, Frame
from dledger.remoting.log.codec import LogCode
from dledger.rpc.clients.codec import ReadAnswer
from dledger.rpc.ports import NodeStatus
from dledger.types import Entry, LogIndex, NodeId, Term

Json = dict[str, Any]
"""An object of JSON."""
TOLERANT_BYTES_MAX: Final = 64 * 1024
"""Of a request that may be fastjson's variant of JSON, whose parser takes half a second for the largest frame."""
_AT_ONCE: Final = 64 * 1024
"""Bytes of a body that are written at once: a thread that writes JSON holds up all others meanwhile."""
_NUMBERS: Final = [str(byte - 256 if byte > 127 else byte) for byte in range(256)]
_INT32_SIGN: Final = 1 << 31
_NONE: Final = -1


def request_of(frame: Frame) -> Json:
    """The object in a request's body. Raises ``InvalidRequestError``."""
    try:
        found = loads(frame.body, tolerant=len(frame.body) <= TOLERANT_BYTES_MAX)
    except RequestError as error:
        raise InvalidRequestError(str(error)) from error
    if not isinstance(found, dict):
        raise InvalidRequestError("malformed body: not an object")
    return found


def check_addressee(request: Json, node_id: NodeId) -> None:
    """Raise ``UnknownMemberError`` for a request to another member; one that names none is for whom it reaches."""
    wanted = request.get("remoteId")
    if wanted is not None and wanted != node_id:
        raise UnknownMemberError(f"this is {node_id}, not {str(wanted)[:64]}")


def text_of(request: Json, name: str) -> str:
    """A member that is a text; empty if it is missing."""
    value = request.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is not a text")
    return value


def number_of(request: Json, name: str, missing: int = _NONE) -> int:
    """A member that is a whole number."""
    value = request.get(name)
    if value is None:
        return missing
    if type(value) is not int:
        raise InvalidRequestError(f"{name} is not a whole number")
    return value


def body_of(request: Json) -> bytes:
    """The body of an entry: base64, as fastjson writes it, or an array of signed numbers, as fastjson2 does."""
    body = request.get("body")
    try:
        if isinstance(body, list):
            return array("b", body).tobytes()
        return base64.b64decode(text_of(request, "body"), validate=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError("body is neither base64 nor an array of bytes") from error


def answer_to(frame: Frame, status: NodeStatus, members: Json) -> Frame:
    """An answer with ``members`` besides those that all have."""
    return frame.answer(ResponseCode.SUCCESS, body=dumps_plain(_base(status) | members))


def _base(status: NodeStatus) -> Json:
    base: Json = {"code": int(ResponseCode.SUCCESS), "group": status.group, "localId": status.node_id}
    base["term"] = int(status.term)
    if status.leader is not None:
        base["leaderId"] = status.leader.node_id
    return base


def error_answer(frame: Frame, status: NodeStatus, error: DLedgerError, members: Json) -> Frame:
    """The answer for an error; who looks into the frame finds its text in the remark."""
    told = members | {"code": int(error.code)}
    if error.leader is not None:
        told["leaderId"] = error.leader.node_id
    return answer_to(frame, status, told)._replace(remark=str(error)[:1000])


def metadata(status: NodeStatus) -> Json:
    """The members of an answer to METADATA; whose address is not known yet is missing."""
    return {"peers": {one.node_id: one.client_address for one in status.members if one.client_address}}


def appended(index: LogIndex, position: int, term: Term) -> Json:
    """The members of an answer to APPEND."""
    return {"index": int(index), "pos": int(position), "term": int(term)}


NOT_APPENDED: Final[Json] = {"index": _NONE, "pos": _NONE}


def encode_entries(first_index: int, status: NodeStatus, answer: ReadAnswer) -> bytes:
    """The body of an answer to GET; not on the loop. Raises ``IndexOutOfRangeError``, as Java does, for the next index,
    too, and ``EntryTooLargeError``.
    """
    if not answer.entries:
        raise IndexOutOfRangeError(
            f"index {first_index} is not readable yet: the last readable index is {answer.committed_index}"
        )
    body = b"".join((b'{"entries":[', b",".join(map(_entry, answer.entries)), b"],", dumps_plain(_base(status))[1:]))
    if len(body) > FRAME_BYTES_MAX - ANSWER_HEADER_BYTES_MAX:
        raise EntryTooLargeError(
            f"entry {first_index} has {len(body)} bytes in JSON, too many for a frame: read it with request "
            f"{LogCode.READ.value}"
        )
    return body


NO_ENTRIES: Final[Json] = {"entries": []}


def _entry(entry: Entry) -> bytes:
    others = {
        "bodyCrc": _signed(entry.body_crc),
        "chainCrc": _signed(entry.chain_crc),
        "channel": _signed(entry.channel),
        "index": int(entry.index),
        "magic": int(entry.magic),
        "pos": int(entry.position),
        "size": ENTRY_HEADER_BYTES + len(entry.body),
        "term": int(entry.term),
    }
    body, number = entry.body, _NUMBERS.__getitem__
    pieces = [",".join(map(number, body[at : at + _AT_ONCE])).encode() for at in range(0, len(body), _AT_ONCE)]
    return b"".join((b'{"body":[', b",".join(pieces), b"],", dumps_plain(others)[1:]))


def _signed(number: int) -> int:
    """A number of 32 bits, as Java's ``int`` has it."""
    return number - 2 * _INT32_SIGN if number >= _INT32_SIGN else number
