"""Asking brokers, ours or RocketMQ's own, how they do: by RocketMQ's protocol, over any transport.

RocketMQ's signature says neither what is asked, nor whom, nor when: whoever gets one can use it for other requests, at
other brokers, for as long as the account exists. So it is given to nobody of whom only a name server says that he is a
broker, unless TLS checks his name, or the user says that name servers can be trusted. ``sign`` is the one place that
signs in this way.
"""

from __future__ import annotations

from typing import Final

from dledger.client.security import ClientSecurity
from dledger.remoting.acl import signed
from dledger.remoting.codes import AnswerCode
from dledger.remoting.errors import RequestError
from dledger.remoting.frame import Frame
from rocketstore.remoting.bodies.runtime import RuntimeInfo
from rocketstore.remoting.codes import RequestCode

_REASON_CHARS_MAX: Final = 200
"""Java's error responses include a position in its code."""
_UNSIGNED: Final = (
    "the request was not signed, because anybody can register an address at a name server: use TLS, or pass "
    "--trust-name-servers"
)


def may_sign(security: ClientSecurity, *, learned: bool) -> bool:
    """Whether an account may sign for an address; ``learned``: a name server told it."""
    return bool(security.access_key) and (not learned or security.tls is not None or security.trust_name_servers)


def sign(frame: Frame, security: ClientSecurity, *, learned: bool) -> Frame:
    """The request with an account's signature, if there is an account and it ``may_sign``."""
    if not may_sign(security, learned=learned):
        return frame
    return frame._replace(fields=signed(frame.fields, frame.body, security.access_key, security.secret_key))


def question(security: ClientSecurity, *, learned: bool) -> Frame:
    """The request whose answer ``read_answer`` reads. It can be sent again and again, to any broker."""
    return sign(Frame(RequestCode.GET_BROKER_RUNTIME_INFO, 0), security, learned=learned)


def read_answer(answer: Frame, security: ClientSecurity, *, learned: bool) -> RuntimeInfo:
    """What the broker says of itself. Raises ``RequestError`` if it refused, or if its answer cannot be read."""
    return RuntimeInfo.decode(body_of(answer, security, learned=learned))


def body_of(answer: Frame, security: ClientSecurity, *, learned: bool) -> bytes:
    """A successful answer's body. Raises ``RequestError`` with the reason of a refusal."""
    if answer.code != AnswerCode.SUCCESS:
        reason = " ".join(answer.remark.split())[:_REASON_CHARS_MAX] or f"answered with code {answer.code}"
        unsigned = bool(security.access_key) and not may_sign(security, learned=learned)
        raise RequestError(f"{reason} ({_UNSIGNED})" if unsigned else reason)
    return answer.body
