"""Records behave as frozen dataclasses do, but for what mypy refuses before they run."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from dledger.records import record


@record(frozen=True, slots=True, order=True)
class _Point:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True, order=True)
class _Frozen:
    x: int
    y: int = 0


def test_equality_order_and_hash_are_those_of_a_frozen_dataclass() -> None:
    """A record is a key, is equal to its like, and is sorted by its fields."""
    assert _Point(1, 2) == _Point(1, 2) != _Point(2, 1)
    assert hash(_Point(1, 2)) == hash(_Frozen(1, 2))
    assert sorted([_Point(2), _Point(1, 5)]) == [_Point(1, 5), _Point(2)]
    assert {_Point(1): "one"}[_Point(1)] == "one"


def test_a_record_is_matched_and_replaced_field_by_field() -> None:
    """What dataclasses' own tools need is there."""
    match replace(_Point(1, 2), y=3):
        case _Point(x, y):
            assert (x, y) == (1, 3)
    assert [field.name for field in fields(_Point)] == ["x", "y"]
    assert repr(_Point(1, 2)).endswith("_Point(x=1, y=2)")


def test_a_record_has_no_other_fields() -> None:
    """Slots: a misspelt field is an error at run time, too."""
    with pytest.raises(AttributeError):
        setattr(_Point(1), "z", 3)  # noqa: B010  # mypy would refuse the plain assignment


def test_a_field_is_refused_by_mypy_and_not_at_run_time() -> None:
    """What the docstring says: the price of making a record four times as fast."""
    point, frozen = _Point(1), _Frozen(1)
    point.x = 2  # type: ignore[misc]  # and mypy complains if this were needless
    with pytest.raises(FrozenInstanceError):
        frozen.x = 2  # type: ignore[misc]

    assert point.x == 2


@record(frozen=True, slots=True)
class _Account:
    name: str
    secret: str = field(default="", repr=False)
    seen: int = field(default=0, compare=False)


@record(frozen=True, slots=True)
class _Own:
    """Says itself what is equal, and how it is shown."""

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Own) and self.text.lower() == other.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())

    def __repr__(self) -> str:
        return self.text


def test_what_is_compiled_late_is_what_a_dataclass_has_at_once() -> None:
    """Fields that are not shown, or not compared; and no record equals another kind with the same fields."""
    one, other = _Account("alice", "s3cret", 1), _Account("alice", "s3cret", 2)
    same_fields: object = ("alice", "s3cret")

    for _ in range(2):  # the first use compiles it
        assert one == other != _Account("bob", "s3cret", 1)
        assert one != same_fields
        assert hash(one) == hash(other) == hash(same_fields)
        assert repr(one).endswith("_Account(name='alice', seen=1)")
    assert len({one, other, _Point(1), _Frozen(1)}) == 3


def test_what_a_record_defines_itself_stays() -> None:
    """As with a dataclass."""
    assert _Own("A") == _Own("a")
    assert len({_Own("A"), _Own("a")}) == 1
    assert repr(_Own("x")) == "x"
