"""Pulls that find messages, read and answered without the general machinery: a busy consumer sends thousands a second.

Frames of any other shape are left to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dledger.remoting.frame import FRAME_BYTES_MAX, Frame, HeaderForm, encode, head_of
from rocketstore.remoting.headers import PullAnswer, PullHeader, read_header, write_header

_NAMES: Final = (
    "consumerGroup",
    "topic",
    "queueId",
    "queueOffset",
    "maxMsgNums",
    "sysFlag",
    "commitOffset",
    "suspendTimeoutMillis",
    "subVersion",
)
_INT32_END: Final = 1 << 31
_INT64_END: Final = 1 << 63
_PLACE: Final = 2_000_000_001
"""Stands for the opaque in the template."""
_REMARK: Final = "FOUND"


def read_pull(fields: Mapping[str, str]) -> PullHeader:
    """As ``read_header``. Raises ``RequestError``."""
    try:
        group, topic, *texts = map(fields.__getitem__, _NAMES)
        digits = "".join(texts)
        queue_id, offset, count, flag, commit, wait_ms, version = map(int, texts)
    except (KeyError, ValueError):
        return read_header(PullHeader, fields)
    fits = max(queue_id, count, flag) < _INT32_END and max(offset, commit, wait_ms, version) < _INT64_END
    if not (fits and digits.isascii() and digits.isdecimal()):
        return read_header(PullHeader, fields)
    others = fields.get("subscription", ""), fields.get("expressionType", "")
    return PullHeader(group, topic, queue_id, offset, count, flag, commit, wait_ms, version, *others)


def found_head(request: Frame, answer: PullAnswer, body_bytes: int) -> bytes:
    """The part of the frame before the messages. Raises ``FrameError`` if they do not fit into one."""
    if request.form is not HeaderForm.JSON or body_bytes > FRAME_BYTES_MAX // 2:
        return head_of(request.answer(0, _REMARK, write_header(answer)), body_bytes)
    numbers = answer.next_begin_offset, answer.min_offset, answer.max_offset, answer.incarnation
    header = _TEMPLATE % (*numbers, request.opaque)
    return (len(header) + 4 + body_bytes).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header


def _template() -> bytes:
    frame = Frame(0, _PLACE).answer(0, _REMARK, write_header(PullAnswer(0, -1, -2, -3, -4)))
    header = encode(frame)[8:].replace(str(_PLACE).encode(), b"%d")
    for number in (b'"-1"', b'"-2"', b'"-3"', b'"-4"'):
        header = header.replace(number, b'"%d"')
    return header


_TEMPLATE: Final = _template()
