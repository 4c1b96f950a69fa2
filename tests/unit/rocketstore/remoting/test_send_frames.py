"""The short ways through frames of sends lead where the long ones lead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting.codes import RequestError
from dledger.remoting.frame import Frame, HeaderForm, cut
from rocketstore.broker_remoting.sends import StoredAnswers, read_send
from rocketstore.remoting.headers import SendAnswer, SendHeader, read_header, write_header
from tests.support.remoting import send_fields

TEXTS = st.sampled_from(["", "0", "1", "-1", "4294967296", "true", "x", "T"])
NAMES = st.sampled_from("abcdefghijklm")
OTHERS = {"MSG_REGION": "R", "TRACE_ON": "true"}


@given(st.dictionaries(NAMES, TEXTS | st.none(), max_size=4))
def test_a_header_says_the_same(changes: dict[str, str | None]) -> None:
    """Or is refused by both, but for numbers that do not fit: of those the store says what is wrong."""
    fields = {name: str(value) for name, value in send_fields("T").items()}
    for name, value in changes.items():
        if value is None:
            fields.pop(name, None)
        else:
            fields[name] = value
    try:
        expected = read_header(SendHeader, fields, short=True)
    except RequestError:
        if "4294967296" not in fields.values() and "" not in fields.values():
            with pytest.raises(RequestError):
                read_send(fields, short=True)
        return
    assert read_send(fields, short=True) == expected


@pytest.mark.parametrize("form", HeaderForm)
@pytest.mark.parametrize("opaque", [0, 7, -1, (1 << 31) - 1])
def test_an_answer_is_the_one_that_would_be_encoded(form: HeaderForm, opaque: int) -> None:
    request = Frame(310, opaque, form=form)
    (answer,), _ = cut(StoredAnswers(OTHERS).encode(request, "7F00000100002A9F0000000000000001", 3, 12))
    assert answer == request.answer(fields=write_header(SendAnswer("7F00000100002A9F0000000000000001", 3, 12)) | OTHERS)
