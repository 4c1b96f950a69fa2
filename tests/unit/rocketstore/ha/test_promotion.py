"""The checks before a promotion: each problem is named by what would be lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_cli.commands import ha
from rocketstore.ha.promotion import CONTACT_MS_MAX, Loss, Master, OtherSlave, checks
from rocketstore.remoting.runtime import NEVER, HaFacts

OWN = HaFacts(True, 3, 1000, "refused", master="m:10912", master_end=1000, lag_ms=500, contact_ms=500)
GONE = Master("m:10912", False, "port for slaves: refused")


def losses(
    own: HaFacts = OWN,
    masters: tuple[Master, ...] = (GONE,),
    others: tuple[OtherSlave, ...] = (),
    unanswered: tuple[str, ...] = (),
) -> list[Loss]:
    """What would be lost."""
    return [one.loss for one in checks(own, masters, others, unanswered) if one.loss is not None]


def test_a_complete_slave_of_a_dead_master_may_be_promoted() -> None:
    """With another one that has no more than it."""
    assert losses(others=(OtherSlave("2", 1000, 3), OtherSlave("3", 10, 1))) == []


@pytest.mark.parametrize(
    ("own", "loss"),
    [
        (replace(OWN, contact_ms=NEVER), Loss.UNKNOWN_BYTES),
        (replace(OWN, contact_ms=CONTACT_MS_MAX + 1), Loss.UNKNOWN_BYTES),
        (replace(OWN, lag_bytes=7, master_end=1007), Loss.MISSING_BYTES),
        (replace(OWN, is_connected=True), Loss.TWO_MASTERS),
    ],
)
def test_what_this_slave_lacks_is_named(own: HaFacts, loss: Loss) -> None:
    """Known to be missing, or not known; or its master is there."""
    assert losses(own) == [loss]


def test_the_number_of_bytes_is_told() -> None:
    """A person decides by it."""
    found = checks(replace(OWN, lag_bytes=7, master_end=1007), (GONE,), (), ())
    assert any("lacks 7 bytes" in one.text and "1007" in one.text for one in found)


def test_a_master_that_answers_is_not_replaced() -> None:
    """Wherever it answers."""
    assert losses(masters=(GONE, Master("m:10911", True, "registered as master"))) == [Loss.TWO_MASTERS]


def test_a_registered_master_that_is_only_silent_may_live() -> None:
    """A cut network looks like this, and its producers may still reach it."""
    assert losses(masters=(GONE, Master("m:10911", False, "no answer", may_live=True))) == [Loss.TWO_MASTERS]


@pytest.mark.parametrize(("error", "may_live"), [(ConnectionRefusedError(), False), (TimeoutError(), True)])
def test_a_refusal_says_that_a_master_is_gone_and_silence_does_not(
    monkeypatch: pytest.MonkeyPatch, error: OSError, *, may_live: bool
) -> None:
    """The machine answers for a process that is gone."""

    def connect(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("socket.create_connection", connect)

    found = ha._registered_master(ha._Asked("127.0.0.1:1", error="no answer"))

    assert (found.answers, found.may_live) == (False, may_live)


def test_where_nobody_knows_the_master_nobody_knows_that_it_is_gone() -> None:
    """Neither an address nor a name server."""
    assert losses(masters=()) == [Loss.UNASKED]
    assert losses(unanswered=("n:9876 does not answer",)) == [Loss.UNASKED]


@pytest.mark.parametrize(
    ("other", "loss"),
    [
        (OtherSlave("2", 1001, 3), Loss.BYTES_OF_OTHERS),
        (OtherSlave("2", 10, 4), Loss.BYTES_OF_OTHERS),
        (OtherSlave("2", error="no answer"), Loss.UNASKED),
        (OtherSlave("2"), Loss.UNASKED),
        (OtherSlave("2", 10, 3, is_promoted=True), Loss.TWO_MASTERS),
    ],
)
def test_another_slave_may_be_the_better_one(other: OtherSlave, loss: Loss) -> None:
    """It has more, follows a later master, or might have more."""
    assert losses(others=(OtherSlave("3", 5, 3), other)) == [loss]
