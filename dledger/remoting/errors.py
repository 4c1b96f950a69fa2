"""Errors in data received over a remoting connection, one class per distinct reaction."""

from __future__ import annotations

from dledger.remoting.codes import AnswerCode


class FrameError(Exception):
    """Raised for invalid frames: nothing after them can be trusted, so the connection is closed."""


class RequestError(Exception):
    """Raised when a request cannot be carried out: the response has ``code``, and the message as its remark."""

    def __init__(self, message: str, code: AnswerCode = AnswerCode.SYSTEM_ERROR) -> None:
        super().__init__(message)
        self.code = code
