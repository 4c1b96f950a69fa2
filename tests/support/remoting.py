"""A remoting client of a few lines, over a plain socket: what a test says goes out as it is."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from dledger.remoting.frame import ANSWER_HEADER_BYTES_MAX, FLAG_ONEWAY, Frame, HeaderForm, cut, encode, signed
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData, ProducerData, SubscriptionData

TIMEOUT_S: Final = 120.0


class RemotingSocket:
    """One connection. Frames that are not the answer waited for are kept in ``others``.

    ``key``: access key and secret, to sign with.
    """

    key: tuple[str, str] | None = None

    def __init__(self, port: int, form: HeaderForm = HeaderForm.JSON, host: str = "127.0.0.1") -> None:
        """``host``: the address to come from, any of 127.0.0.0/8."""
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S, source_address=(host, 0))
        self.form = form
        self.others: list[Frame] = []
        self._opaque = 0
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def ask(self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"") -> Frame:
        """The answer to a request."""
        return self.answer_to(self.begin(code, fields, body))

    def begin(self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"", flag: int = 0) -> int:
        """Send a request; its opaque."""
        self._opaque += 1
        texts = {name: str(value) for name, value in (fields or {}).items()}
        if self.key is not None:
            texts = signed(texts, body, *self.key)
        self.socket.sendall(encode(Frame(code, self._opaque, texts, body, flag, form=self.form)))
        return self._opaque

    def tell(self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"") -> None:
        """Send a request that wants no answer."""
        self.begin(code, fields, body, FLAG_ONEWAY)

    def answer_to(self, opaque: int) -> Frame:
        """The answer to what was sent before."""
        while True:
            for at, frame in enumerate(self.others):
                if frame.is_response and frame.opaque == opaque:
                    return self.others.pop(at)
            self.others += self._received()

    def reply(self, request: Frame, code: int = 0, remark: str = "", body: bytes = b"") -> None:
        """Answer a request of the other side."""
        self.socket.sendall(encode(request.answer(code, remark, body=body)))

    def request(self, code: int) -> Frame:
        """The next request of this code that the other side sends."""
        while True:
            for at, frame in enumerate(self.others):
                if not frame.is_response and frame.code == code:
                    return self.others.pop(at)
            self.others += self._received()

    @property
    def is_hung_up(self) -> bool:
        """Wait until the other side hangs up; whether it did without another frame, notices aside."""
        try:
            while True:
                found = self._received()
                self.others += found
                if any(one.code != RequestCode.NOTIFY_CONSUMER_IDS_CHANGED for one in found):
                    return False
        except (EOFError, ConnectionError):
            return True

    def _received(self) -> list[Frame]:
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError("hung up")
        self._buffer += data
        frames, end = cut(self._buffer, header_bytes_max=ANSWER_HEADER_BYTES_MAX)
        del self._buffer[:end]
        return frames

    def send(self, topic: str = "T", body: bytes = b"hello", queue_id: int = 0, properties: str = "") -> Frame:
        """The answer to a message in the short form."""
        return self.ask(RequestCode.SEND_MESSAGE_V2, send_fields(topic, queue_id, properties), body)

    def begin_send(self, topic: str, body: bytes, queue_id: int = 0) -> int:
        """Send a message in the short form; the request's opaque."""
        return self.begin(RequestCode.SEND_MESSAGE_V2, send_fields(topic, queue_id), body)

    def subscribe(
        self, group: str, topic: str, tags: str = "*", *, client_id: str = "c1", version: int = 1, kind: str = "TAG"
    ) -> Frame:
        """The answer to a heartbeat of one consumer group (and a producer group of the same name)."""
        subscription = SubscriptionData(topic, tags, sub_version=version, expression_type=kind)
        consumer = ConsumerData(group, subscription_data_set=(subscription,))
        beat = HeartbeatData(client_id, (ProducerData(group),), (consumer,))
        return self.ask(RequestCode.HEART_BEAT, None, beat.encode())


def send_fields(topic: str, queue_id: int = 0, properties: str = "", queues: int = 4) -> dict[str, object]:
    """Of a message in the short form."""
    return {
        "a": "producers",
        "b": topic,
        "c": "TBW102",
        "d": queues,
        "e": queue_id,
        "f": 0,
        "g": 1_700_000_000_000,
        "h": 0,
        "i": properties,
        "j": 0,
        "k": "false",
        "m": "false",
    }


def pull_fields(group: str, topic: str, offset: int = 0, **others: object) -> dict[str, object]:
    """Of a pull that does not wait."""
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 0,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subVersion": 0,
    } | others
