"""Signed calls made by hand: replayed, aged, altered, as a client never makes them."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import grpc

from dledger.access import guard
from tests.support.grpc_client import trailing_metadata

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Answer:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing: dict[str, str] = field(default_factory=dict)
    data: bytes = b""


class SignedCalls:
    """To one server. Use as a context manager."""

    def __init__(self, address: str, key: str = "", secret: str = "") -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._key = key
        self._secret = secret
        self.audience = ""

    def __enter__(self) -> SignedCalls:
        return self

    def __exit__(self, *_error: object) -> None:
        self._channel.close()

    def metadata(self, method: str, body: bytes | None, *, age_ms: int = 0, nonce: str = "") -> Metadata:
        """A signature as a client makes it, made ``age_ms`` ago."""
        stamp = str(time.time_ns() // 1_000_000 - age_ms)
        nonce = nonce or f"{secrets.token_hex(8)}-1"
        parts = (method, self._key, stamp, nonce, self.audience, guard.digest_of(body))
        return (
            (guard.ACCESS_KEY, self._key),
            (guard.TIMESTAMP, stamp),
            (guard.NONCE, nonce),
            (guard.AUDIENCE, self.audience),
            (guard.SIGNATURE, guard._signature(self._secret.encode(), *parts)),
        )

    def meet(self, method: str, body: bytes) -> None:
        """Learn for whom to sign."""
        answer = self.call(method, body, self.metadata(method, body))
        self.audience = answer.trailing.get(guard.AUDIENCE, "")
        assert self.audience, answer

    def call(self, method: str, body: bytes, metadata: Metadata = (), *, timeout_s: float | None = 10) -> Answer:
        """One unary call."""
        call = self._channel.unary_unary(method, request_serializer=None, response_deserializer=None)
        try:
            return Answer(grpc.StatusCode.OK, data=call(body, timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as error:
            return Answer(error.code(), error.details() or "", trailing_metadata(error))
