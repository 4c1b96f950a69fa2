"""Any bytes over a remoting connection are frames and bodies, or one of two errors; what is written reads the same."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting.codes import FrameError, RequestError
from dledger.remoting.fastjson import dumps, loads
from dledger.remoting.frame import Frame, HeaderForm, cut, decode, encode, is_signed, signed
from rocketstore.remoting import topics
from rocketstore.remoting.body import Body
from rocketstore.remoting.headers import read_header, write_header
from rocketstore.remoting.topics import RegisterBrokerBody, TopicConfigData
from tests.fuzz.remoting_shapes import BODIES, HEADERS, INT32, TEXTS, frames_of, made
from tests.fuzz.shapes import changed_json, fuzzed, mutilated
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


@fuzzed(200)
@given(st.lists(frames_of(HeaderForm.JSON) | frames_of(HeaderForm.BINARY), max_size=4), st.data())
def test_frames_read_as_they_were_written(frames: list[Frame], data: st.DataObject) -> None:
    """In one buffer, cut anywhere."""
    stream = b"".join(map(encode, frames))
    middle = data.draw(st.integers(0, len(stream)))
    first, end = cut(bytearray(stream[:middle]))
    rest, last = cut(stream, end)
    assert first + rest == frames
    assert last == len(stream)


@st.composite
def _nearly_captured(draw: st.DrawFn) -> bytes:
    """A captured frame of which one part was damaged; often its lengths say how long the parts are now."""
    sound = draw(st.sampled_from(sorted(GOLDEN)).map(lambda name: GOLDEN[name].data))
    if draw(st.integers(0, 3)) == 0:
        return draw(mutilated(sound))
    end = 8 + int.from_bytes(sound[5:8])
    header, body = sound[8:end], sound[end:]
    if body and draw(st.booleans()):
        body = draw(mutilated(body) | changed_json(body))
    else:
        header = draw(mutilated(header) | changed_json(header))
    return struct.pack(">iI", 4 + len(header) + len(body), sound[4] << 24 | len(header)) + header + body


@fuzzed(400)
@given(_nearly_captured() | st.binary(max_size=100))
def test_any_bytes_are_frames_or_one_kind_of_error(data: bytes) -> None:
    """And what is a frame can be written, and reads the same; its header has fields or a named lack."""
    with suppress(FrameError):
        frames, end = cut(data)
        assert 0 <= end <= len(data)
        for frame in frames:
            assert decode(memoryview(encode(frame))) == frame
            _use(frame)


def _use(frame: Frame) -> None:
    """As every handler together would."""
    is_signed("secret", frame.fields, frame.body)
    for kind in HEADERS.values():
        for short in (False, True):
            with suppress(RequestError):
                header = read_header(kind, frame.fields, short=short)
                assert read_header(kind, write_header(header, short=short), short=short) == header
    for kind in BODIES.values():
        with suppress(RequestError):
            kind.decode(frame.body)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_read_as_they_were_written(name: str) -> None:
    """In both forms of names."""

    @fuzzed(20)
    @given(made(HEADERS[name]), st.booleans())
    def run(header: Any, short: bool) -> None:  # noqa: ANN401  # of the class
        assert read_header(HEADERS[name], write_header(header, short=short), short=short) == header

    run()


@pytest.mark.parametrize("name", BODIES)
def test_bodies_read_as_they_were_written(name: str) -> None:
    """And of what they become in some other hand, they are read or refused."""
    kind = BODIES[name]

    @fuzzed(30)
    @given(made(kind), st.data())
    def run(body: Body, data: st.DataObject) -> None:
        written = body.encode()
        assert kind.decode(written) == body
        assert dumps(loads(written)) == written
        with suppress(RequestError):
            found = kind.decode(data.draw(mutilated(written) | changed_json(written)))
            assert kind.decode(found.encode()) == found

    run()


def _texts_of_fastjson() -> Iterator[st.SearchStrategy[str]]:
    """Its parts in any order, so that many are nearly right."""
    yield st.sampled_from(
        ["{", "}", "[", "]", ":", ",", " ", "'", '"', "\\", "\\u", "d8", "{{", "}:", "0", "-1", "1e5"]
    )
    yield st.sampled_from(["null", "NaN", "true", "name", '"text"', "'text'", r'"\ud800"', "1.5", "9" * 20])


@fuzzed(600)
@given(st.lists(st.one_of(*_texts_of_fastjson()), max_size=30).map("".join))
def test_any_text_is_a_value_or_one_kind_of_error(text: str) -> None:
    """And what is a value can be written; written, it is read by the strict parser or has objects as keys."""
    with suppress(RequestError):
        value = loads(text.encode())
        written = dumps(value)
        assert dumps(loads(written)) == written


@fuzzed(200)
@given(st.binary(max_size=200) | mutilated(GOLDEN["F58"].frame.body) | mutilated(GOLDEN["F46"].frame.body))
def test_any_bytes_are_a_value_or_one_kind_of_error(data: bytes) -> None:
    """Also those that are no text."""
    with suppress(RequestError):
        dumps(loads(data))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@fuzzed(200)
@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_both_parsers_read_json_alike(value: object, ascii_only: bool, indent: int | str | None) -> None:
    """Digits as a key bring in the second one."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).replace("-Infinity", "NaN")
    data = text.encode("utf-8", "replace")
    assert loads(b"{0:" + data + b"}") == {"0": loads(data)}


NAMES = st.text(st.sampled_from("abcXYZ_%-0"), min_size=1, max_size=12)
COMPACT_TOPICS = st.dictionaries(NAMES, st.tuples(INT32, INT32, INT32), max_size=4).map(
    lambda found: {name: TopicConfigData(name, *numbers) for name, numbers in found.items()}
)


@fuzzed(100)
@given(COMPACT_TOPICS, st.lists(TEXTS, max_size=3), st.data())
def test_compact_registrations_read_as_they_were_written(
    table: dict[str, TopicConfigData], filters: list[str], data: st.DataObject
) -> None:
    """Mutilated, they are read or refused."""
    body = RegisterBrokerBody(topics.TopicConfigTable(topics.DataVersion(1, 2), table), tuple(filters))
    written = body.encode_compressed()
    assert RegisterBrokerBody.decode_compressed(written) == body
    with suppress(RequestError):
        RegisterBrokerBody.decode_compressed(data.draw(mutilated(written)))


@fuzzed(100)
@given(st.dictionaries(TEXTS, TEXTS, max_size=4), st.binary(max_size=20), TEXTS, TEXTS, TEXTS)
def test_what_is_signed_passes_with_its_key_only(
    fields: dict[str, str], body: bytes, key: str, secret: str, other: str
) -> None:
    """Whatever it is."""
    found = signed(fields, body, key, secret)
    assert is_signed(secret, found, body)
    assert is_signed(other, found, body) is (other.encode().rstrip(b"\0") == secret.encode().rstrip(b"\0"))
