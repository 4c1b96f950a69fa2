"""Pop among the replicated tables: a window's commit is the group's offset, and both go with group and topic."""

from __future__ import annotations

import json

import pytest

from rocketstore.pop.tables import Parked, PopPlace, PopRow
from rocketstore.state.changes import (
    CommitOffsets,
    DeleteGroup,
    DeleteTopic,
    MalformedStateError,
    PopRows,
    QueueOffset,
    decode_state,
    encode_change,
    join_changes,
    split_full,
)
from rocketstore.state.tables import Tables

PLACE = PopPlace("group", "T", 0)
RETRIES = PopPlace("group", "%RETRY%group_T", 0)


def _popped() -> Tables:
    """Messages 5 to 24 were given out; 6 is settled, and 5 invisible for long."""
    row = PopRow(PLACE, 1, 5, reserved=25, settled_from=6, settled=1, parked=((5, Parked(10**12, 1, 1)),))
    return Tables([PopRows((row, PopRow(RETRIES, 2, 0), PopRow(PLACE._replace(group="other"), 3, 0)))])


def test_the_window_commits_the_groups_offset() -> None:
    tables = _popped()
    assert tables.groups["group"] == {("T", 0): 7, ("%RETRY%group_T", 0): 0}
    assert tables.offset_count == 3


def test_a_row_that_does_not_count_makes_no_group() -> None:
    tables = Tables([PopRows((PopRow(PLACE, 1, settled=1),))])
    assert not tables.groups


def test_a_full_state_has_all_of_it() -> None:
    tables = _popped()
    tables.apply(CommitOffsets("group", (QueueOffset("T", 0, 2),), reset=True))
    tables.apply(PopRows((PopRow(PLACE, 4, 2, reserved=3),)))
    bodies = split_full(tables.as_changes(), full_id="1", upto=0, bytes_max=300)
    assert len(bodies) > 1
    again = Tables(change for body in bodies for change in decode_state(body).changes)
    for copy in (again, tables.copy(), tables.mirror(())):
        assert copy.pop.windows == tables.pop.windows
        assert copy.pop.epoch == tables.pop.epoch == 4
        assert copy.groups == tables.groups
        assert copy.offset_count == tables.offset_count


def test_a_reset_forgets_the_window() -> None:
    """P12."""
    tables = _popped()
    tables.apply(CommitOffsets("group", (QueueOffset("T", 0, 7),), reset=True))
    assert PLACE not in tables.pop.windows
    assert tables.groups["group"]["T", 0] == 7


def test_a_commit_of_a_consumer_that_pulls_moves_the_window() -> None:
    """P11 keeps consumers from doing so; administrators may."""
    tables = _popped()
    tables.apply(CommitOffsets("group", (QueueOffset("T", 0, 7),)))
    assert tables.pop.windows[PLACE].generation == 1, "it repeats what is known"
    tables.apply(CommitOffsets("group", (QueueOffset("T", 0, 9),)))
    assert (tables.pop.windows[PLACE].commit, tables.pop.windows[PLACE].generation) == (9, 4)
    assert list(tables.pop.windows[PLACE].parked) == [5]


@pytest.mark.parametrize("change", [DeleteGroup("group"), DeleteTopic("T")])
def test_what_is_deleted_leaves_no_window(change: DeleteGroup | DeleteTopic) -> None:
    """P12."""
    tables = _popped()
    tables.apply(change)
    assert PLACE not in tables.pop.windows
    assert tables.offset_count == sum(map(len, tables.groups.values()))
    assert tables.pop.epoch == 3


def test_a_truncated_log_cuts_windows_and_offsets_alike() -> None:
    tables = _popped()
    tables.put_back(lambda topic, _queue_id: 6 if topic == "T" else 0)
    window = tables.pop.windows[PLACE]
    assert window.commit == tables.groups["group"]["T", 0] == 6
    assert window.reserved == 6
    assert list(window.parked) == [5]


def test_a_malformed_row_makes_the_message_malformed() -> None:
    good = json.loads(join_changes([encode_change(PopRows((PopRow(PLACE, 1, 5),)))]))
    for spoil in ([], ["group", "T", 0, 0, {}], ["group", "T", 0, 1, {"reserved": -4}]):
        good["changes"][0]["rows"] = [spoil]
        with pytest.raises(MalformedStateError, match="pop row"):
            decode_state(json.dumps(good).encode())
