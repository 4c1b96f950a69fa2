"""Frames of sends, read and answered without the general machinery: there is one for every message.

Frames of any other shape are left to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dledger.remoting.frame import Frame, HeaderForm, encode
from rocketstore.remoting.headers import SendAnswer, SendHeader, read_header, write_header

_SHORT: Final = ("a", "b", "c", "d", "e", "f", "g", "h")
_LONG: Final = (
    "producerGroup",
    "topic",
    "defaultTopic",
    "defaultTopicQueueNums",
    "queueId",
    "sysFlag",
    "bornTimestamp",
    "flag",
)
_SHORT_REST: Final = ("i", "j", "k", "l", "m")
_LONG_REST: Final = ("properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch")
_PLACE: Final = 2_000_000_001
"""Stands for a number in a template; no answer has it for its own."""


def read_send(fields: Mapping[str, str], *, short: bool) -> SendHeader:
    """As ``read_header``. Raises ``RequestError``."""
    names = _SHORT if short else _LONG
    try:
        group, topic, default_topic, queues, queue_id, sys_flag, born, flag = map(fields.__getitem__, names)
        numbers = int(queues), int(queue_id), int(sys_flag), int(born), int(flag)
        properties, times, unit, most, batch = map(fields.get, _SHORT_REST if short else _LONG_REST)
        return SendHeader(
            group,
            topic,
            default_topic,
            *numbers,
            properties or "",
            int(times) if times else 0,
            (unit or "").lower() == "true",
            int(most) if most else -1,
            (batch or "").lower() == "true",
        )
    except (KeyError, ValueError):
        return read_header(SendHeader, fields, short=short)


class StoredAnswers:
    """Answers to messages that are stored; ``others`` are fields that all of them have."""

    def __init__(self, others: Mapping[str, str]) -> None:
        self._others = dict(others)
        frame = Frame(0, 0).answer(fields=self._fields("%s", -1, -2))._replace(opaque=_PLACE)
        header = encode(frame)[8:].replace(b"%s", b"%b").replace(b'"-1"', b'"%d"').replace(b'"-2"', b'"%d"')
        self._header = header.replace(str(_PLACE).encode(), b"%d")

    def encode(self, request: Frame, message_id: str, queue_id: int, queue_offset: int) -> bytes:
        """The whole frame."""
        if request.form is not HeaderForm.JSON:
            return encode(request.answer(fields=self._fields(message_id, queue_id, queue_offset)))
        header = self._header % (message_id.encode(), queue_id, queue_offset, request.opaque)
        return (len(header) + 4).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header

    def _fields(self, message_id: str, queue_id: int, queue_offset: int) -> dict[str, str]:
        return write_header(SendAnswer(message_id, queue_id, queue_offset)) | self._others
