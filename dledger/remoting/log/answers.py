"""Answers to requests with codes of ours: a body, or an error that the client raises again as the same one."""

from __future__ import annotations

from typing import Final

from dledger.errors import (
    AccessDeniedError,
    DLedgerError,
    PendingFullError,
    RequestTimeoutError,
    ShutdownError,
    UnavailableError,
    told,
)
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import Frame, HeaderForm, encode
from dledger.rpc.clients.codec import decode_error, encode_error

_PLACE: Final = 2_000_000_001
"""Stands for the opaque in the template; no answer of a template has it for its own."""


def error_answer(request: Frame, error: DLedgerError) -> Frame:
    """The answer that tells a client of an error."""
    return request.answer(error.code, told(error), body=encode_error(error))


def error_of(answer: Frame, address: str) -> DLedgerError:
    """The error that an answer from ``address`` tells of; also one of a server that knows none of ours."""
    if answer.body:
        error = decode_error(answer.body)
        return AccessDeniedError(f"{address}: {error}") if isinstance(error, AccessDeniedError) else error
    why = f"{address} refused the request: {answer.remark or f'code {answer.code}'}"
    match answer.code:
        case AnswerCode.SYSTEM_BUSY:
            return PendingFullError(why)
        case AnswerCode.REQUEST_CODE_NOT_SUPPORTED:
            return UnavailableError(why)
        case AnswerCode.SERVICE_NOT_AVAILABLE:
            return ShutdownError(why)
        case _:
            return RequestTimeoutError(why)


def success_bytes(request: Frame, body: bytes) -> bytes:
    """The whole frame of an answer, without the general machinery: there is one for every append."""
    if request.form is not HeaderForm.JSON:
        return encode(request.answer(body=body))
    header = _HEADER % request.opaque
    return (len(header) + 4 + len(body)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + body


_HEADER: Final = encode(Frame(0, _PLACE).answer())[8:].replace(str(_PLACE).encode(), b"%d")
