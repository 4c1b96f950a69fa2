"""Asking brokers, ours or RocketMQ's own, how they do: by RocketMQ's protocol, over any transport."""

from __future__ import annotations

from typing import Final

from dledger.client.security import ClientSecurity
from rocketstore.remoting.acl import signed
from rocketstore.remoting.bodies.runtime import RuntimeInfo
from rocketstore.remoting.codes import AnswerCode, RequestCode
from rocketstore.remoting.errors import RequestError
from rocketstore.remoting.frame import Frame

_REASON_CHARS_MAX: Final = 200
"""Java's error responses include a position in its code."""


def sign(frame: Frame, security: ClientSecurity) -> Frame:
    """The request with an account's signature, if there is an account."""
    if not security.access_key:
        return frame
    return frame._replace(fields=signed(frame.fields, frame.body, security.access_key, security.secret_key))


def question(security: ClientSecurity) -> Frame:
    """The request whose answer ``read_answer`` reads. It can be sent again and again, to any broker."""
    return sign(Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0), security)


def read_answer(answer: Frame) -> RuntimeInfo:
    """What the broker says of itself. Raises ``RequestError`` if it refused, or if its answer cannot be read."""
    return RuntimeInfo.decode(body_of(answer))


def body_of(answer: Frame) -> bytes:
    """A successful answer's body. Raises ``RequestError`` with the reason of a refusal."""
    if answer.code != AnswerCode.SUCCESS:
        raise RequestError(" ".join(answer.remark.split())[:_REASON_CHARS_MAX] or f"answered with code {answer.code}")
    return answer.body
