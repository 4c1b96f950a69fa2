"""Stored messages as clients of gRPC get them, whoever sent them."""

from __future__ import annotations

import gzip
import os
import sys
import zlib

import pytest

from rocketstore.grpc import messages
from rocketstore.grpc.messages import to_client
from rocketstore.message.message import SYS_FLAG_COMPRESSED, Message
from rocketstore.message.record import encode_record
from rocketstore.pb import definition_pb2 as pb
from tests.support.compressors import rocketmq_5_compressors


def delivered(body: bytes, bytes_max: int = 1 << 20, flag: int = SYS_FLAG_COMPRESSED) -> pb.Message:
    return to_client(encode_record(Message("T", body, sys_flag=flag)), bytes_max)


@pytest.mark.parametrize("body", [b"", b"a", b"text " * 50_000, os.urandom(100_000)], ids=len)
def test_what_rocketmq_4_compressed_can_be_read(body: bytes) -> None:
    """Its producers use zlib's form, which these clients do not know: they get the same data in gzip's."""
    packed = zlib.compress(body)
    found = delivered(packed)
    assert found.system_properties.body_encoding == pb.GZIP
    assert gzip.decompress(found.body) == body
    assert len(found.body) == len(packed) + 12


@pytest.mark.parametrize(
    "body",
    [b"no compression", zlib.compress(b"text")[:-1], zlib.compress(b"text") + b"more", zlib.compress(bytes(2 << 20))],
    ids=["other", "cut", "longer", "too large"],
)
def test_what_is_not_understood_stays_as_it_is(body: bytes) -> None:
    """And nothing is unpacked without a limit."""
    found = delivered(body)
    assert (found.body, found.system_properties.body_encoding) == (body, pb.IDENTITY)


def test_what_rocketmq_5_compressed_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """LZ4 and Zstandard, in gzip's form; nothing is unpacked without a limit."""
    body = b"text " * 5000
    for flag, compress in rocketmq_5_compressors():
        found = delivered(compress(body), flag=flag)
        assert found.system_properties.body_encoding == pb.GZIP
        assert gzip.decompress(found.body) == body
        for wrong in (compress(body)[:-4], compress(bytes(2 << 20)), b"none"):
            assert (delivered(wrong, flag=flag).body, delivered(wrong, flag=flag).system_properties.body_encoding) == (
                wrong,
                pb.IDENTITY,
            )
        monkeypatch.setattr("rocketstore.grpc.messages.REPACKED_BYTES_MAX", 10)
        assert delivered(compress(body), flag=flag).system_properties.body_encoding == pb.IDENTITY
        monkeypatch.undo()


def test_what_cannot_be_read_here_is_told_to_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: clients get the body as it is stored."""
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    messages._warn_once.cache_clear()
    for _ in range(2):
        assert delivered(b"packed", flag=0x101).body == b"packed"
    assert caplog.text.count("extra 'compression'") == 1


def test_other_bodies_are_untouched() -> None:
    """Compressed with gzip, or not at all."""
    packed = gzip.compress(b"text")
    assert (delivered(packed).body, delivered(packed).system_properties.body_encoding) == (packed, pb.GZIP)
    plain = delivered(zlib.compress(b"text"), flag=0)
    assert (plain.body, plain.system_properties.body_encoding) == (zlib.compress(b"text"), pb.IDENTITY)
