"""Headers: every class reads what it wrote, and refuses what it must."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, get_args, get_type_hints

import pytest

from dledger.remoting.codes import AnswerCode, RequestError
from rocketstore.remoting import headers
from rocketstore.remoting.headers import (
    Bits,
    Named,
    PullHeader,
    QueueHeader,
    RouteHeader,
    SendAnswer,
    SendHeader,
    Short,
    UnregisterClientHeader,
    ValueAnswer,
    read_header,
    write_header,
)

KINDS: dict[str, type[Any]] = {
    name: kind
    for name, kind in vars(headers).items()
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == headers.__name__
    if kind not in (Bits, Named, Short)
}
SEND = {
    "producerGroup": "p",
    "topic": "t",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "-1",
    "sysFlag": "0",
    "bornTimestamp": "1795330159425",
    "flag": "0",
}
SHORT = dict(zip("abcdefgh", SEND.values(), strict=True))


def _full(kind: type[Any], number: int) -> Any:  # noqa: ANN401  # of any class
    """One with a value in each field that is not its default."""
    values: dict[type, object] = {int: number, str: f"text {number}", bool: True}
    hints = get_type_hints(kind)
    return kind(
        *[not one.default if one.default is True else values[hints[one.name]] for one in dataclasses.fields(kind)]
    )


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_reads_the_same(name: str, short: bool) -> None:
    """With everything, and with what is required."""
    full = _full(KINDS[name], 7)
    fields = write_header(full, short=short)
    assert len(fields) == len(dataclasses.fields(full))
    assert all(type(text) is str for text in fields.values())
    assert read_header(KINDS[name], fields, short=short) == full

    for one in dataclasses.fields(full):
        if one.default is not dataclasses.MISSING:
            full = dataclasses.replace(full, **{one.name: one.default})
    fields = write_header(full, short=short)
    assert len(fields) == sum(one.default is dataclasses.MISSING for one in dataclasses.fields(full))
    assert read_header(KINDS[name], fields, short=short) == full


@pytest.mark.parametrize("name", KINDS)
def test_each_required_field_is_named_when_it_is_missing(name: str) -> None:
    """In Java's words, as clients show them."""
    fields = write_header(_full(KINDS[name], 7))
    required = [
        wire
        for wire, one in zip(fields, dataclasses.fields(KINDS[name]), strict=True)
        if one.default is dataclasses.MISSING
    ]
    for wire in required:
        with pytest.raises(RequestError, match=f"^the custom field <{wire}> is null$") as caught:
            read_header(KINDS[name], {key: text for key, text in fields.items() if key != wire})
        assert caught.value.code is AnswerCode.SYSTEM_ERROR


def _numbers() -> list[tuple[str, str, int]]:
    """Class, wire name and width of each number."""
    found = []
    for name, kind in KINDS.items():
        hints = get_type_hints(kind, include_extras=True)
        wires = list(write_header(_full(kind, 7)))
        for one, wire in zip(dataclasses.fields(kind), wires, strict=True):
            note = next(
                (each for each in getattr(hints[one.name], "__metadata__", ()) if isinstance(each, headers.Bits)), None
            )
            if note is not None:
                found.append((name, wire, note.width))
    return found


@pytest.mark.parametrize(("name", "wire", "width"), _numbers())
def test_numbers_are_read_up_to_their_bounds(name: str, wire: str, width: int) -> None:
    """And not one further; 32 or 64 bits, signed."""
    limit = 1 << (width - 1)
    for short in (False, True):
        fields = write_header(_full(KINDS[name], 7), short=short)
        used = list(fields)[list(write_header(_full(KINDS[name], 7))).index(wire)]
        for good in (limit - 1, -limit, 0):
            read = read_header(KINDS[name], {**fields, used: str(good)}, short=short)
            assert write_header(read, short=short).get(used, "0") in {str(good), "0"}
            assert good in dataclasses.astuple(read)
        for bad in (limit, -limit - 1):
            with pytest.raises(RequestError, match=f"<{used}> must be a whole number of {width} bits, not '{bad}'"):
                read_header(KINDS[name], {**fields, used: str(bad)}, short=short)


@pytest.mark.parametrize("text", ["", " ", "1 ", "1.0", "1e3", "0x1", "one", "--1", "+", "\u0663", "9" * 5000, "1\n"])
def test_what_is_no_number_is_refused(text: str) -> None:
    """And shown, but not all of it."""
    with pytest.raises(RequestError, match="<queueId> must be a whole number") as caught:
        read_header(QueueHeader, {"topic": "t", "queueId": text})
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(("text", "number"), [("+5", 5), ("-0", 0), ("007", 7)])
def test_numbers_as_java_takes_them(text: str, number: int) -> None:
    """A sign, and zeros before."""
    assert read_header(QueueHeader, {"topic": "t", "queueId": text}).queue_id == number


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("TRUE", True), ("false", False), ("1", False), ("", False), ("yes", False)]
)
def test_truths_as_java_takes_them(text: str, expected: bool) -> None:
    """Only one word is true."""
    assert (
        read_header(RouteHeader, {"topic": "t", "acceptStandardJsonOnly": text}).accept_standard_json_only is expected
    )


def test_a_send_in_its_two_forms() -> None:
    """One-letter names in one, whole ones in the other; neither reads the other's."""
    expected = SendHeader("p", "t", "TBW102", 4, -1, 0, 1795330159425, 0)
    assert read_header(SendHeader, SEND) == read_header(SendHeader, SHORT, short=True) == expected
    assert write_header(expected) == SEND
    assert write_header(expected, short=True) == SHORT
    with pytest.raises(RequestError, match="<producerGroup> is null"):
        read_header(SendHeader, SHORT)
    with pytest.raises(RequestError, match="<a> is null"):
        read_header(SendHeader, SEND, short=True)
    more = {"i": "KEYS\1k", "j": "2", "k": "true", "l": "16", "m": "true"}
    assert read_header(SendHeader, {**SHORT, **more}, short=True) == SendHeader(
        "p", "t", "TBW102", 4, -1, 0, 1795330159425, 0, "KEYS\1k", 2, unit_mode=True, max_reconsume_times=16, batch=True
    )


def test_unknown_fields_are_ignored() -> None:
    """Those of newer clients, and of signatures."""
    assert read_header(QueueHeader, {"topic": "t", "queueId": "1", "bname": "b", "Signature": "s"}) == QueueHeader(
        "t", 1
    )


def test_empty_texts_are_texts() -> None:
    """C++ sends an empty consumer group, and Go an empty subscription."""
    assert read_header(UnregisterClientHeader, {"clientID": "c", "consumerGroup": ""}).consumer_group == ""
    assert read_header(QueueHeader, {"topic": "", "queueId": "1"}).topic == ""
    assert write_header(ValueAnswer("")) == {}
    assert write_header(SendAnswer("", 0, 0)) == {"msgId": "", "queueId": "0", "queueOffset": "0"}


def test_names_on_the_wire() -> None:
    """Of attributes with several words, and of those that Java spells its own way."""
    pull = PullHeader("g", "t", 1, 2, 3, 4, 5, 6, 7, "*", "TAG")
    assert list(write_header(pull)) == [
        *("consumerGroup", "topic", "queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset"),
        *("suspendTimeoutMillis", "subVersion", "subscription", "expressionType"),
    ]
    assert write_header(UnregisterClientHeader("c")) == {"clientID": "c"}


def test_a_note_of_the_width_is_needed_for_every_number() -> None:
    """A plain ``int`` has no bounds."""
    for kind in KINDS.values():
        hints = get_type_hints(kind, include_extras=True)
        assert int not in hints.values()


def test_notes_with_one_name_are_told_apart() -> None:
    """Before Python 3.11.3 ``typing`` makes types with equal notes once: one field would get the other's name."""
    notes: list[object] = [Named("n"), Short("n")]

    assert notes[0] != notes[1]
    assert get_args(Annotated[str, Named("n")])[1] == Named("n")
    assert get_args(Annotated[str, Short("n")])[1] == Short("n")
