"""The short ways through frames of pulls lead where the long ones lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.remoting.codes import FrameError, RequestError
from dledger.remoting.frame import FRAME_BYTES_MAX, Frame, HeaderForm, head_of
from rocketstore.broker_remoting.pulls import found_head, read_pull
from rocketstore.remoting.headers import PullAnswer, PullHeader, read_header, write_header
from tests.support.remoting import pull_fields

FIELDS = {name: str(value) for name, value in pull_fields("g", "T", subscription="a", expressionType="TAG").items()}
TEXTS = st.one_of(
    st.sampled_from(["", "0", "-1", "+1", " 1", "1_0", "٣", "x", "1.0", str(1 << 31), str(1 << 63)]),
    st.integers(-(1 << 64), 1 << 64).map(str),
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), TEXTS | st.none(), max_size=4))
def test_a_header_says_the_same(changes: dict[str, str | None]) -> None:
    """Or is refused with the same words."""
    fields = {name: text for name, text in {**FIELDS, **changes}.items() if text is not None}

    assert outcome(read_pull, fields) == outcome(partial(read_header, PullHeader), fields)


def outcome(read: Callable[[Mapping[str, str]], PullHeader], fields: Mapping[str, str]) -> PullHeader | str:
    """The header, or why it is refused."""
    try:
        return read(fields)
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize("form", HeaderForm)
@pytest.mark.parametrize("opaque", [0, 7, -1, (1 << 31) - 1])
@pytest.mark.parametrize("body_bytes", [1, 40_000, FRAME_BYTES_MAX - 1000])
def test_a_head_is_the_one_that_would_be_encoded(form: HeaderForm, opaque: int, body_bytes: int) -> None:
    request, answer = Frame(11, opaque, form=form), PullAnswer(0, 1 << 40, 0, (1 << 63) - 1, (1 << 63) - 5)

    head = found_head(request, answer, body_bytes)

    assert head == head_of(request.answer(0, "FOUND", write_header(answer)), body_bytes)


def test_what_does_not_fit_into_a_frame_is_not_begun() -> None:
    with pytest.raises(FrameError):
        found_head(Frame(11, 1), PullAnswer(0, 1, 0, 1), FRAME_BYTES_MAX)
