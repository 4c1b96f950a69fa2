"""fastjson's dialect: what is read as what, what is refused, and what is written."""

from __future__ import annotations

import json
import math

import pytest

from dledger.remoting.codes import RequestError
from dledger.remoting.fastjson import (
    DEPTH_MAX,
    ESCAPES_MAX,
    TOLERANT_VALUES_MAX,
    VALUES_MAX,
    ObjectKey,
    dumps,
    dumps_plain,
    loads,
)

QUEUE = '{"brokerName":"b","queueId":0,"topic":"t"}'

READ = {
    "JSON": ('{"a":[1,-2.5,true,false,null,"x"]}', {"a": [1, -2.5, True, False, None, "x"]}),
    "JSON with a newline behind": ('{"a":1}\n', {"a": 1}),
    "digits as keys": ('{0:"h:1",-1:2,"x":{10:[ ]}}', {"0": "h:1", "-1": 2, "x": {"10": []}}),
    "spaces": (" { 0 : 1 , 1 : 2 } ", {"0": 1, "1": 2}),
    "an object as key": ('{{"topic":"t","brokerName":"b","queueId":0}:5}', {QUEUE: 5}),
    "objects as keys, deeper": ("{1:[{{}:{}},{ {'a':1} : 2}]}", {"1": [{"{}": {}}, {'{"a":1}': 2}]}),
    "single quotes": (r"{'a':'b\'c\"d\\e\u00e9\n'}", {"a": "b'c\"d\\e\u00e9\n"}),
    "double quotes in single ones": ("['a\"b']", ['a"b']),
    "names as keys": ("{a:1,$b_2:true,null:3}", {"a": 1, "$b_2": True, "null": 3}),
    "names as values": ("{a:[NaN,Infinity,undefined,null,true,false]}", {"a": [None] * 4 + [True, False]}),
    "no numbers in JSON": ('{"a":[NaN,-Infinity]}', {"a": [None, None]}),
    "control characters": ('{"a":"\x01\n"}', {"a": "\x01\n"}),
    "numbers": ("{1.5:1,2:-0.5e3,3:1E2,4:-7}", {"1.5": 1, "2": -500.0, "3": 100.0, "4": -7}),
    "escapes": (r'{0:"\u0041\ud83d\ude00\"\\"}', {"0": 'A\U0001f600"\\'}),
    "names twice": ('{"a":1,"a":2}', {"a": 2}),
    "digits twice": ('{1:1,"1":2}', {"1": 2}),
    "no object": ("7", 7),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str) -> None:
    """By either parser."""
    text, expected = READ[name]
    assert loads(text.encode()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "[1",
        "{1",
        "{1:",
        "{1:2",
        "{1:2,",
        "{1:2,}",
        "[1,]",
        "{1:2]",
        "[1}",
        "{1 2}",
        "{1:2}x",
        "nil",
        "{a:b}",
        "'",
        "{'a:1}",
        '{0:"a}',
        r"{0:'\q'}",
        r"{0:'\u12'}",
        r'{0:"\u12"}',
        "{0:-}",
        "{0:--1}",
        "{0:.5}",
        "{[1]:2}",
        "{{a:{b:1}}:2}",
        "{{{a:1}:1}:2}",
        "{{a:[1]}:2}",
        "\ufeff{}",
        "{0:" + "9" * 5000 + "}",
        '{"a":' + "9" * 5000 + "}",
    ],
)
def test_what_is_refused(text: str) -> None:
    """With one kind of error."""
    with pytest.raises(RequestError, match="malformed body"):
        loads(text.encode())


@pytest.mark.parametrize("data", [b"\xff", b'{"a":"\xed\xa0\x80"}', '{"a":1}'.encode("utf-16")])
def test_other_encodings_are_refused(data: bytes) -> None:
    """``json`` alone would take all but the first."""
    with pytest.raises(RequestError, match="UTF-8"):
        loads(data)


@pytest.mark.parametrize("key", ['"a"', "0"])
@pytest.mark.parametrize(
    ("escaped", "expected"),
    [
        (r"\ud800", "?"),
        (r"\uDFFFx", "?x"),
        (r"\ud83d\uDE00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00", "?\U0001f600"),
        (r"\ude00\ud83d", "??"),
        (r"\\ud800", r"\ud800"),
        (r"\\\ud800", "\\?"),
    ],
)
def test_halves_of_surrogate_pairs_become_question_marks(key: str, escaped: str, expected: str) -> None:
    """UTF-8 has no form for them, so that no text of ours may hold one."""
    assert loads(f'{{{key}:"{escaped}"}}'.encode()) == {key.strip('"'): expected}


@pytest.mark.parametrize("opening", ["[", '{"a":', "{1:", "{{}:"])
def test_nesting_is_bounded(opening: str) -> None:
    """Refused as any other, and not with a RecursionError."""
    for text in (opening * 100_000, opening * (DEPTH_MAX * 40) + "0" + "]" * (DEPTH_MAX * 40)):
        with pytest.raises(RequestError):
            loads(text.encode())


def test_depth_at_its_bound() -> None:
    """Of what is no JSON."""
    assert loads(b"{1:" * DEPTH_MAX + b"[]" + b"}" * DEPTH_MAX)
    with pytest.raises(RequestError):
        loads(b"{1:" * (DEPTH_MAX + 1) + b"[]" + b"}" * (DEPTH_MAX + 1))


def test_the_number_of_values_is_bounded() -> None:
    """In JSON, where it is a matter of memory, and elsewhere, where it is one of time."""
    assert loads(b"[" + b"1," * (VALUES_MAX - 3) + b"1]")
    with pytest.raises(RequestError, match="values"):
        loads(b"[" + b"1," * VALUES_MAX + b"1]")
    members = ",".join(f"{one}:0" for one in range(TOLERANT_VALUES_MAX - 1))
    assert loads(f"{{{members}}}".encode())
    with pytest.raises(RequestError):
        loads(f"{{{members},x:0}}".encode())


@pytest.mark.parametrize("text", ['["\\ud800%s"]', "['%s']"])
@pytest.mark.parametrize("escape", [r"\ud800", r"\\"])
def test_the_number_of_escapes_is_bounded_where_each_takes_time(text: str, escape: str) -> None:
    """With surrogates, and in single quotes; else they cost no more than other characters."""
    few = loads((text % (escape * 1000)).encode())
    assert isinstance(few, list)
    assert len(few[0]) in {1000, 1001}
    with pytest.raises(RequestError):
        loads((text % (escape * ESCAPES_MAX)).encode())
    assert loads(f'["{chr(92) * 2 * ESCAPES_MAX}"]'.encode()) == ["\\" * ESCAPES_MAX]


def test_what_is_written() -> None:
    """Sorted, without nulls and spaces, ASCII."""
    value = {
        "b": [1, -2.5, True, None, math.nan, math.inf],
        "a": {ObjectKey(QUEUE): {"z": None, "y": ""}},
        "c": {"10": 0, "2": '\u00e9\U0001f600"\\\n'},
    }
    expected = (
        '{"a":{' + QUEUE + ':{"y":""}},"b":[1,-2.5,true,null,null,null],'
        '"c":{"10":0,"2":"\\u00e9\\ud83d\\ude00\\"\\\\\\n"}}'
    )
    assert dumps(value) == expected.encode()
    assert loads(dumps(value)) == {
        "a": {QUEUE: {"y": ""}},
        "b": [1, -2.5, True, None, None, None],
        "c": {"10": 0, "2": '\u00e9\U0001f600"\\\n'},
    }


def test_what_is_plain_is_written_alike() -> None:
    """By the faster way."""
    value = {"b": [1, -2.5, True, '\u00e9\U0001f600"\\\n\x7f'], "a": {"10": 0, "2": {}, "": []}}
    assert dumps_plain(value) == dumps(value)


def test_what_has_no_form_is_an_error_of_ours() -> None:
    """No silent text instead."""
    with pytest.raises(TypeError, match="set has no form"):
        dumps({"a": {1}})


def test_objects_as_keys_are_read_again_as_they_were_written() -> None:
    """Whatever their order of members was."""
    once = loads(b'{{"topic":"t","queueId":0,"brokerName":"b"}:{}}')
    assert dumps(once) == f"{{{QUEUE}:{{}}}}".encode()
    assert loads(dumps(once)) == once == {QUEUE: {}}
    assert json.loads(next(iter({QUEUE: 0}))) == {"topic": "t", "queueId": 0, "brokerName": "b"}
