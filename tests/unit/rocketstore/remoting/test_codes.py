"""Numbers of the protocol that other programs know."""

from __future__ import annotations

from dledger.remoting.codes import LANGUAGES, VERSION, AnswerCode, Language
from rocketstore.remoting.codes import RequestCode
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


def test_numbers_and_names_are_there_once() -> None:
    """A number given twice would be an alias of the first, unseen."""
    for kind in (RequestCode, AnswerCode, Language):
        assert len(kind.__members__) == len(list(kind))


def test_languages_are_numbered_without_gaps() -> None:
    """Binary headers hold the number, in one byte."""
    assert list(Language) == list(range(13))
    assert list(LANGUAGES) == [
        *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST")
    ]


def test_numbers_of_captured_frames_are_known() -> None:
    """Those of requests and those of answers."""
    for one in GOLDEN.values():
        frame = one.frame
        assert frame.code in (set(AnswerCode) if frame.is_response else set(RequestCode)), one.description


def test_descriptions_of_captured_requests_name_their_numbers() -> None:
    """As far as a description begins with the request's name."""
    named = 0
    for one in GOLDEN.values():
        words = [word.strip(",.:") for word in one.description.replace("ROCKETMQ header: ", "").split()]
        found = next((word for word in words[:2] if word in RequestCode.__members__), None)
        if found is not None and not one.frame.is_response:
            assert one.frame.code == RequestCode[found]
            named += 1
    assert named >= 35


def test_our_version_is_the_one_that_clients_take_for_a_whole_4_9() -> None:
    """V4_9_8's place in RocketMQ's list."""
    assert VERSION == 409
