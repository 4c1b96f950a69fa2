"""Frames: limits, what is no frame, and what is lost in which form."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting import frame as frame_module
from dledger.remoting.codes import VERSION, FrameError, Language
from dledger.remoting.frame import (
    ANSWER_HEADER_BYTES_MAX,
    FIELDS_MAX,
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    Frame,
    HeaderForm,
    cut,
    decode,
    encode,
    head_of,
)

JSON, BINARY = HeaderForm.JSON, HeaderForm.BINARY
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
LENGTH_MAX = FRAME_BYTES_MAX - 4


def framed(header: bytes, body: bytes = b"", *, kind: int = 0) -> memoryview:
    """A frame with any header."""
    return memoryview(struct.pack(">iI", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body)


def binary(fields: bytes = b"", *, remark: bytes = b"", remark_bytes: int = -1, fields_bytes: int = -1) -> memoryview:
    """A frame with a binary header, whose lengths may lie."""
    head = struct.pack(">hBhiii", 10, 0, 1, 2, 0, len(remark) if remark_bytes == -1 else remark_bytes) + remark
    return framed(head + struct.pack(">i", len(fields) if fields_bytes == -1 else fields_bytes) + fields, kind=1)


def entry(name: bytes, value: bytes) -> bytes:
    """One field of a binary header."""
    return struct.pack(">h", len(name)) + name + struct.pack(">i", len(value)) + value


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [INT32_MIN, -1, 0, 3, LENGTH_MAX + 1, INT32_MAX])
def test_a_length_out_of_bounds_is_told_by_its_first_four_bytes(length: int) -> None:
    """Nothing is waited for, and nothing stored."""
    with pytest.raises(FrameError, match=f"a frame of {length} bytes"):
        cut(struct.pack(">i", length))


@pytest.mark.parametrize("length", [4, LENGTH_MAX])
def test_a_length_at_its_bounds_is_waited_for(length: int) -> None:
    """Both are in."""
    assert cut(struct.pack(">i", length)) == ([], 0)


@pytest.mark.parametrize("form", HeaderForm)
def test_the_longest_frame_is_written_and_read(form: HeaderForm) -> None:
    """And not a byte more."""
    empty = Frame(10, 1, form=form)
    room = FRAME_BYTES_MAX - len(encode(empty))
    data = encode(empty._replace(body=bytes(room)))
    assert len(data) == FRAME_BYTES_MAX
    assert len(decode(memoryview(data)).body) == room
    with pytest.raises(FrameError, match="at most"):
        head_of(empty, room + 1)


@pytest.mark.parametrize("form", HeaderForm)
def test_the_longest_header_is_written_and_read(form: HeaderForm) -> None:
    """And not a byte more."""
    empty = Frame(10, 1, {"k": "v"}, form=form)
    room = HEADER_BYTES_MAX + 9 - len(encode(empty))
    longest = empty._replace(fields={"k": "v" * room})
    assert decode(memoryview(encode(longest))) == longest
    with pytest.raises(FrameError, match="at most"):
        encode(empty._replace(fields={"k": "v" * (room + 1)}))
    with pytest.raises(FrameError, match=f"a header of {HEADER_BYTES_MAX + 1} bytes: at most"):
        decode(framed(bytes(HEADER_BYTES_MAX + 1), kind=form))


@pytest.mark.parametrize("form", HeaderForm)
def test_an_answers_header_may_be_as_long_as_a_client_takes_it(form: HeaderForm) -> None:
    """What limits requests does not limit our own answers: something is stored by then. And not a byte more."""
    empty = Frame(10, 1, {"k": "v"}, flag=FLAG_RESPONSE, form=form)
    room = ANSWER_HEADER_BYTES_MAX + 9 - len(encode(empty))
    longest = empty._replace(fields={"k": "v" * room})
    data = encode(longest)
    assert cut(data, header_bytes_max=ANSWER_HEADER_BYTES_MAX) == ([longest], len(data))
    with pytest.raises(FrameError, match="at most"):
        cut(data)
    with pytest.raises(FrameError, match="at most"):
        encode(empty._replace(fields={"k": "v" * (room + 1)}))


def test_a_header_longer_than_its_frame_is_refused() -> None:
    """It would reach into the next frame."""
    with pytest.raises(FrameError, match="a header of 7 bytes in a frame of 14 bytes"):
        cut(struct.pack(">iI", 10, 7) + bytes(20))


@pytest.mark.parametrize("kind", [2, 3, 127, 255])
def test_an_unknown_kind_of_header_is_refused(kind: int) -> None:
    """As in Java."""
    with pytest.raises(FrameError, match=f"kind of header {kind}"):
        decode(framed(b"{}", kind=kind))


def test_cutting_goes_on_where_it_is_told_to() -> None:
    """And says where the rest begins."""
    one, two = encode(Frame(10, 1, body=b"x")), encode(Frame(11, 2))
    frames, end = cut(b"..." + one + two + two[:5], 3)
    assert [frame.code for frame in frames] == [10, 11]
    assert end == 3 + len(one) + len(two)
    assert cut(b"") == ([], 0)
    assert cut(b"\0\0\0") == ([], 0)


def test_a_buffer_that_was_cut_can_be_emptied() -> None:
    """No view of it outlives the call, not even in the traceback of an error."""
    buffer = bytearray(encode(Frame(10, 1)) + framed(b"no JSON"))
    with pytest.raises(FrameError):  # noqa: PT012  # while the traceback is alive
        try:
            cut(buffer)
        except FrameError:
            buffer.clear()
            raise
    assert not buffer


# -- JSON headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{'code':1}",
        b"{code:1}",
        b"[" * 200_000,
        b'{"code":' + b"9" * 5000 + b"}",
        b'{"code":1.0}',
        b'{"code":true}',
        b'{"code":"1"}',
        b'{"code":null}',
        b'{"code":2147483648}',
        b'{"opaque":-2147483649}',
        b'{"flag":1e3}',
        b'{"version":[]}',
        b'{"extFields":[]}',
        b'{"extFields":"a"}',
        b'{"extFields":0}',
        b'{"extFields":{"a":[]}}',
        b'{"extFields":{"a":{}}}',
        b'{"code":1}x',
        b"\xef\xbb\xbf{}",
        b'{"code":1,"remark":"\xed\xa0\x80"}',
        '{"code":1,"extFields":{"a":"\\ud800"}}'.encode("utf-16"),
    ],
)
def test_a_header_that_is_not_the_json_we_know_is_refused(header: bytes) -> None:
    """``json`` itself takes other encodings, and raw halves of surrogate pairs, which nobody could write again."""
    with pytest.raises(FrameError):
        decode(framed(header))


@pytest.mark.parametrize("name", ["code", "opaque", "flag", "version"])
@pytest.mark.parametrize("number", [INT32_MIN, -1, 0, INT32_MAX])
def test_numbers_at_their_bounds(name: str, number: int) -> None:
    """32 bits, signed."""
    frame = decode(framed(b'{"%s":%d}' % (name.encode(), number)))
    assert getattr(frame, name) == number
    assert decode(memoryview(encode(frame))) == frame


def test_an_empty_object_is_a_header() -> None:
    """Members that are missing are zero or empty; who sent it is not known."""
    assert decode(framed(b"{}")) == Frame(0, 0, version=0, language=Language.OTHER)
    assert decode(framed(b'{"extFields":null,"remark":null,"language":null}')) == decode(framed(b"{}"))
    assert decode(framed(b'{"remark":7,"language":7,"new":[{}]}')) == decode(framed(b"{}"))


@pytest.mark.parametrize(("text", "expected"), [("GO", Language.GO), ("RUST", Language.RUST), ("go", Language.OTHER)])
def test_languages_go_by_name(text: str, expected: Language) -> None:
    """One that is not known is another one."""
    assert decode(framed(b'{"language":"%s"}' % text.encode())).language is expected


def test_of_a_name_that_comes_twice_the_last_counts() -> None:
    """As in Java."""
    assert decode(framed(b'{"code":1,"code":2,"extFields":{"a":"1","a":"2"}}'))[:3] == (2, 0, {"a": "2"})


def test_fields_in_the_form_of_the_cpp_client() -> None:
    """Numbers become texts, and a null is as good as none; an empty text stays one."""
    frame = decode(framed(b'{"extFields":{"a":4,"b":-1.5,"c":true,"d":false,"e":null,"f":"","g":NaN}}\n'))
    assert frame.fields == {"a": "4", "b": "-1.5", "c": "true", "d": "false", "f": ""}


def test_the_number_of_fields_is_bounded() -> None:
    """In either form."""
    fields = {f"k{number}": "v" for number in range(FIELDS_MAX)}
    for form in HeaderForm:
        full = Frame(1, 1, fields, form=form)
        assert decode(memoryview(encode(full))) == full
        with pytest.raises(FrameError, match=r"at most 256|more than 256"):
            decode(memoryview(encode(full._replace(fields={**fields, "one": "more"}))))


def test_halves_of_surrogate_pairs_become_question_marks() -> None:
    """In names and in values; whole pairs stay."""
    frame = decode(framed(rb'{"code":1,"remark":"a\ud800","extFields":{"\uDFFFk":"\ud83d\ude00\\ud800\udead"}}'))
    assert (frame.remark, frame.fields) == ("a?", {"?k": "\U0001f600\\ud800?"})
    assert decode(memoryview(encode(frame))) == frame


@pytest.mark.parametrize("form", HeaderForm)
def test_halves_of_our_own_are_written_as_question_marks(form: HeaderForm) -> None:
    """A file's name in an error, say: an answer with one is better than none."""
    frame = decode(memoryview(encode(Frame(1, 1, {"a\udc80": "b\udc80"}, remark="c\udc80", form=form))))
    assert (frame.fields, frame.remark) == ({"a?": "b?"}, "c?")


def test_an_answer_always_has_fields_and_a_request_only_if_there_are_any() -> None:
    """Java's clients look into an answer's without asking whether there are any."""
    assert b'"extFields":{}' in encode(Frame(0, 1, flag=FLAG_RESPONSE))
    assert b"extFields" not in encode(Frame(0, 1))


# -- binary headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        framed(b"", kind=1),
        framed(bytes(20), kind=1),
        binary(remark_bytes=1 << 30),
        binary(remark_bytes=-2),
        binary(remark_bytes=5),
        binary(remark=b"\xff"),
        binary(fields_bytes=1),
        binary(fields_bytes=-2),
        binary(fields_bytes=INT32_MAX),
        binary(entry(b"\xff", b"v")),
        binary(entry(b"k", b"\xff")),
        binary(entry(b"k", b"v") + b"\0"),
        binary(b"\0"),
        binary(b"\0\1k"),
        binary(b"\0\1k\0\0\0"),
        binary(b"\0\1k\0\0\0\5v"),
        binary(b"\xff\xffk\0\0\0\1v"),
        binary(b"\0\1k\xff\xff\xff\xffv"),
        binary(entry(b"k", b"value") + b"rest", fields_bytes=8),
    ],
)
def test_a_binary_header_that_does_not_add_up_is_refused(data: memoryview) -> None:
    """Wherever it ends, and whatever a length says."""
    with pytest.raises(FrameError):
        decode(data)


def test_what_a_binary_header_says() -> None:
    """Empty values are null; of a name that comes twice the last value counts."""
    fields = entry(b"a", b"1") + entry(b"b", b"") + entry(b"a", b"2") + entry(b"", b"3")
    frame = decode(binary(fields, remark="\u00e9".encode()))
    assert frame == Frame(10, 2, {"a": "2", "": "3"}, b"", 0, "\u00e9", 1, Language.JAVA, BINARY)


@pytest.mark.parametrize("name", ["code", "version"])
@pytest.mark.parametrize("number", [-(1 << 15), (1 << 15) - 1])
def test_short_numbers_at_their_bounds(name: str, number: int) -> None:
    """Code and version have 16 bits in a binary header."""
    frame = Frame(10, 1, form=BINARY)._replace(**_changed(name, number))
    assert decode(memoryview(encode(frame))) == frame
    beyond = frame._replace(**_changed(name, number + (1 if number > 0 else -1)))
    with pytest.raises(FrameError, match="do not fit"):
        encode(beyond)
    assert encode(beyond._replace(form=JSON))


def _changed(name: str, number: int) -> dict[str, Any]:
    return {name: number}


@pytest.mark.parametrize("number", range(0, 256, 5))
def test_languages_go_by_number(number: int) -> None:
    """One that is not known is another one."""
    data = bytearray(encode(Frame(10, 1, form=BINARY)))
    data[10] = number
    expected = Language(number) if number <= Language.RUST else Language.OTHER
    assert decode(memoryview(data)).language is expected


def test_a_name_longer_than_its_length_can_say_is_refused() -> None:
    """Ours; none can come in."""
    longest = Frame(1, 1, {"k" * 32767: "v"}, form=BINARY)
    assert decode(memoryview(encode(longest))) == longest
    with pytest.raises(FrameError, match="does not fit"):
        encode(Frame(1, 1, {"k" * 32768: "v"}, form=BINARY))


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", HeaderForm)
def test_an_answer_has_its_requests_number_and_form(form: HeaderForm) -> None:
    """And says our version, by which clients decide what they may ask for."""
    request = Frame(11, 77, {"a": "b"}, b"x", FLAG_ONEWAY, form=form, language=Language.GO, version=1)
    answer = request.answer(19, "nothing", {"c": "d"}, b"y")
    assert answer == Frame(19, 77, {"c": "d"}, b"y", FLAG_RESPONSE, "nothing", VERSION, Language.PYTHON, form)
    assert request.is_oneway
    assert not request.is_response
    assert answer.is_response
    assert not answer.is_oneway
    assert decode(memoryview(encode(answer))) == answer


# -- usual headers, which take a shorter way ---------------------------------------------------------------------------


def _known(header: bytes, decoder: Callable[[bytes, bytes], Frame]) -> Frame | str:
    """What a decoder makes of a header: the frame, or why it is none."""
    try:
        return decoder(header, b"body")
    except FrameError as error:
        return str(error)


_SCALARS = st.none() | st.booleans() | st.integers(-(1 << 33), 1 << 33) | st.floats() | st.text(max_size=8)
_FIELDS = st.dictionaries(st.text(max_size=4), st.text(max_size=8) | _SCALARS | st.lists(_SCALARS, max_size=1))
_MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "code": st.integers(-(1 << 32), 1 << 32) | _SCALARS,
        "extFields": st.dictionaries(st.text(max_size=4), st.text(max_size=8)) | _FIELDS | _SCALARS,
        "flag": st.integers(0, 3) | _SCALARS,
        "language": st.sampled_from(["JAVA", "GO", "", "KLINGON"]) | _SCALARS,
        "opaque": st.integers(-(1 << 32), 1 << 32) | _SCALARS,
        "remark": st.text(max_size=8) | _SCALARS,
        "serializeTypeCurrentRPC": st.just("JSON") | _SCALARS,
        "version": st.integers(0, 500) | _SCALARS,
        "unknown": _SCALARS,
    },
)


@given(members=_MEMBERS, escaped=st.booleans(), garble=st.none() | st.tuples(st.floats(0, 1), st.binary(max_size=3)))
def test_the_short_way_of_usual_headers_leads_to_the_same_frame(
    members: dict[str, object], *, escaped: bool, garble: tuple[float, bytes] | None
) -> None:
    """Or to the same refusal: which of the two decoders reads a header makes no difference."""
    header = json.dumps(members, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    if garble is not None:
        at = round(garble[0] * len(header))
        header = header[:at] + garble[1] + header[at + 1 :]

    assert _known(header, frame_module._from_json) == _known(header, frame_module._from_any_json)


@pytest.mark.parametrize(
    "header",
    [
        rb'{"code":1,"code":2,"extFields":{"a":"1","a":"2"}}',
        rb'{"remark":"\ud83d\ude00"}',
        rb'{"remark":"\ud83d"}',
        rb'{"extFields":{"\udc00":"\ud800\u0041"}}',
        rb'{"co\u0064e":5}',
        b' {"code":-0}\n ',
        b'{"remark":"a\x01b"}',
        b'{"remark":"\xff"}',
        b'{"unknown":"\xff"}',
        b'{"unknown":[1,{"a":NaN}]}',
        b'{"remark":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"code":1}',
        b'{"extFields":{' + b",".join(b'"%d":""' % one for one in range(FIELDS_MAX + 1)) + b"}}",
        b'{"extFields":' + b"[" * 100_000,
    ],
)
def test_unusual_texts_are_read_alike_on_both_ways(header: bytes) -> None:
    """Repeated members, escapes, halves of pairs, bytes that are not UTF-8, too many fields."""
    assert _known(header, frame_module._from_json) == _known(header, frame_module._from_any_json)
