"""What people read at a start about settings that change nothing: alarms, unsupported subjects, and the rest."""

from __future__ import annotations

import logging

import pytest

from dledger.java_names import ALARMS, ALIASES, FAMILIES, SWITCHED_OFF, UNUSED, Idleness, Risk, family_of
from dledger.setting_sources import Given, alarms_first, notices, places


def given(**texts: str) -> list[Given]:
    """One line of a file per setting."""
    return [Given(name, text, f"/b.conf:{line}") for line, (name, text) in enumerate(texts.items(), start=1)]


def test_what_needs_nothing_is_one_line_however_much_it_is() -> None:
    """Names of one subject stand together, with the subject; the order is that of the file."""
    found = notices(given(sendMessageThreadPoolNums="16", useEpollNativeSelector="true", pullMessageThreadPoolNums="9"))

    assert found == (
        "settings that change nothing here: sendMessageThreadPoolNums, pullMessageThreadPoolNums (no thread pools), "
        "useEpollNativeSelector (no Netty)",
    )


def test_an_unsupported_subject_is_a_line_with_its_places_and_what_to_do() -> None:
    """One line for all names of the subject."""
    (line,) = notices(given(popPollingSize="1", reviveQueueNum="8"))

    assert line == (
        "tuning of pop: not supported: popPollingSize, reviveQueueNum (/b.conf:1,2). Pop is always available, and its "
        "state is in the log; mqadmin setConsumeMode switches a group to it"
    )


@pytest.mark.parametrize("off", ["false", "FALSE ", "", "no", "0"])
def test_a_feature_that_is_switched_off_is_no_warning_of_its_own(off: str) -> None:
    """It is what happens here anyway."""
    assert notices(given(timerWheelEnable=off)) == (
        "settings that change nothing here: timerWheelEnable (timed messages of RocketMQ 5)",
    )
    assert notices(given(authenticationEnabled=off)) == (
        "settings that change nothing here: authenticationEnabled (RocketMQ 5's authentication)",
    )


@pytest.mark.parametrize("name", sorted(ALARMS))
def test_protection_that_is_not_given_is_an_alarm_with_value_and_place(name: str) -> None:
    """Before everything else, whatever the order in the file."""
    found = notices([*given(popPollingSize="1"), Given(name, "true", "flag x")])

    assert found[0].startswith(f"{ALARMS[name].risk.upper()}: {name}=true (flag x) ")
    assert found[1].startswith("tuning of pop")
    assert len(found) == 2


def test_alarms_stay_first_among_other_warnings() -> None:
    """The order of the others is kept."""
    marked = [f"{risk.upper()}: x" for risk in Risk]

    assert alarms_first(["b", marked[1], "a", marked[0]]) == (marked[1], marked[0], "b", "a")


def test_a_long_list_is_cut_and_the_debug_log_has_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """A start must stay readable."""
    names = sorted(family_of("sendMessageThreadPoolNums").names)
    caplog.set_level(logging.DEBUG, "dledger.setting_sources")

    (line,) = notices([Given(name, "1", f"/b.conf:{at}") for at, name in enumerate(names, start=1)])

    assert line.count(", ") == 7
    assert f"and {len(names) - 8} more" in line
    assert [one.getMessage().partition("=")[0] for one in caplog.records] == names
    assert caplog.records[2].getMessage().startswith(f"{names[2]}=1 (/b.conf:3): no purpose here: One event loop")


def test_places_name_each_file_once() -> None:
    """Flags and variables have no line."""
    some = [Given("a", "", one) for one in ("/b:1", "/b:7", "flag a", "/c:2", "/b:7")]

    assert places(some) == "/b:1,7; flag a; /c:2"


def test_a_name_belongs_to_one_family_and_has_an_effect_or_a_reason() -> None:
    """Nothing is said twice, and nothing that ``dledger serve`` uses is said to be useless."""
    names = [name for family in FAMILIES for name in family.names]

    assert len(names) == len(set(names)) == len(UNUSED)
    assert not UNUSED & set(ALIASES)
    assert set(ALARMS) <= UNUSED
    assert all(family.means.endswith(".") and family.names for family in FAMILIES)
    assert {family.idleness for family in FAMILIES} == set(Idleness)
    assert all(one == one.lower() for one in SWITCHED_OFF)
