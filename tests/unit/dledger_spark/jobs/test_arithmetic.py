"""What is added up without Spark: retention, hours, sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_spark.jobs.retention import (
    RetentionOptions,
    RetentionSegment,
    Setting,
    _Part,
    outcome,
    report,
    segments_of,
)
from dledger_spark.jobs.source import LogSource
from dledger_spark.jobs.stats import COLUMNS_MAX, HOUR_MS, MINUTE_MS, silent_hours, spans

NOW = 1_000 * HOUR_MS


def _segment(number: int, age_hours: float | None) -> RetentionSegment:
    newest = None if age_hours is None else NOW - round(age_hours * HOUR_MS)
    return RetentionSegment(f"{number:020d}", 10, 800, 1000, None if newest is None else newest - HOUR_MS, newest)


LOG = [_segment(0, 100), _segment(1000, 50), _segment(2000, 10), _segment(3000, 0.5)]


def _deleted(setting: Setting, segments: list[RetentionSegment] = LOG) -> int:
    return outcome(segments, setting, NOW).segments


@pytest.mark.parametrize(
    ("setting", "deleted"),
    [
        (Setting(hours=200), 0),
        (Setting(hours=72), 1),
        (Setting(hours=50), 1),  # exactly that old has not expired
        (Setting(hours=49), 2),
        (Setting(hours=0), 3),  # the newest stays
        (Setting(disk_bytes=4000), 0),
        (Setting(disk_bytes=3999), 1),
        (Setting(disk_bytes=0), 3),
        (Setting(hours=72, disk_bytes=2000), 2),  # whichever deletes more
        (Setting(), 0),
    ],
)
def test_a_setting_deletes_the_oldest_segments_that_it_does_not_cover(setting: Setting, deleted: int) -> None:
    """The rule of ``dledger.store.cleaner``: whole segments, from the oldest on, never the newest."""
    assert _deleted(setting) == deleted


def test_nothing_is_deleted_past_a_segment_that_stays() -> None:
    """A young segment protects the older-looking ones behind it; one without any time is not known to be old."""
    assert _deleted(Setting(hours=72), [_segment(0, 1), _segment(1000, 100), _segment(2000, 0)]) == 0
    assert _deleted(Setting(hours=72), [_segment(0, None), _segment(1000, 100), _segment(2000, 0)]) == 0
    assert _deleted(Setting(hours=0), []) == 0


@given(st.lists(st.floats(0, 500), max_size=8), st.floats(0, 500), st.integers(0, 9000))
def test_what_goes_and_what_stays_is_the_log(ages: list[float], hours: float, kept_bytes: int) -> None:
    """And asking for less never keeps more."""
    log = [_segment(1000 * at, age) for at, age in enumerate(sorted(ages, reverse=True))]
    one = outcome(log, Setting(hours, kept_bytes), NOW)

    assert one.disk_bytes + one.kept_disk_bytes == sum(segment.disk_bytes for segment in log)
    assert one.messages == 10 * one.segments
    assert outcome(log, Setting(hours / 2, kept_bytes // 2), NOW).segments >= one.segments


def test_a_retention_report_tells_segments_topics_and_settings() -> None:
    """Files give sizes and, where no message has a time, ages; what would go is marked in tables and charts."""
    parts = [
        _Part("00", "a", 3, 300, NOW - 90 * HOUR_MS, NOW - 80 * HOUR_MS),
        _Part("00", "b", 1, 100, NOW - 85 * HOUR_MS, NOW - 84 * HOUR_MS),
        _Part("10", "a", 2, 200, NOW - 2 * HOUR_MS, NOW - HOUR_MS),
    ]
    files = {"00": (1000, 5), "10": (1000, 6), "20": (1000, 7)}

    found = report(RetentionOptions(LogSource(path="x"), Setting(hours=72)), parts, files, NOW)

    assert [found.fact(name) for name in ("segments", "live bytes", "bytes on disk", "deleted segments")] == [
        3,
        600,
        3000,
        1,
    ]
    assert found.fact("kept from") == NOW - 2 * HOUR_MS
    assert found.table("By topic").rows[0][:4] == ("a", 5, 500, 300)
    assert [row[-1] for row in found.table("By segment").rows] == [True, False, False]
    assert [one.values for one in found.charts[0].series] == [(0.0, 200.0, 0.0), (400.0, 0.0, 0.0)]
    assert found.table("What a setting would delete").rows[0][:3] == ("72 h", 1, 4)
    assert segments_of(parts, files)[2] == RetentionSegment("20", 0, 0, 1000, None, 7)
    assert [one.disk_bytes for one in segments_of(parts, {})] == [400, 200]


def test_hours_become_columns_with_rates_over_what_the_log_covers() -> None:
    """The first and the last hour are rarely whole: their rates are of the part that there is."""
    by_hour = {NOW: (600, 6000), NOW + 2 * HOUR_MS: (60, 600)}
    found = spans(by_hour, NOW + HOUR_MS - 60_000, NOW + 2 * HOUR_MS + 30_000)

    assert [one.messages for one in found] == [600, 0, 60]
    assert [one.messages_per_s for one in found] == [10.0, 0.0, 2.0]
    assert found[0].bytes_per_s == 100.0
    assert silent_hours(by_hour) == 1
    assert (spans({}, 0, 0), silent_hours({})) == ([], 0)


def test_a_short_log_becomes_minutes_and_a_column_says_how_long_it_is() -> None:
    """Three hours of minutes are not put together; labels have a date only where days matter."""
    begin = NOW - NOW % HOUR_MS
    found = spans({begin + 179 * MINUTE_MS: (30, 3), begin: (60, 6)}, begin, begin + 180 * MINUTE_MS, unit_ms=MINUTE_MS)

    assert (len(found), found[0].width, found[0].messages_per_s) == (COLUMNS_MAX, "minute", 1.0)
    assert (found[0].label[2], len(found[0].label)) == (":", 5)
    hours = spans({begin: (1, 1), begin + 400 * HOUR_MS: (1, 1)}, begin, begin + 401 * HOUR_MS)
    assert (hours[0].width, len(hours[0].label)) == ("3 hours", 11)
    assert spans({begin: (1, 1)}, begin, begin)[0].width == "hour"


@given(st.dictionaries(st.integers(0, 3000), st.integers(1, 99), min_size=1))
def test_many_hours_are_put_together_without_losing_a_message(hours: dict[int, int]) -> None:
    """At most as many columns as fit."""
    by_hour = {hour * HOUR_MS: (count, count) for hour, count in hours.items()}
    found = spans(by_hour, 0, 3001 * HOUR_MS)

    assert sum(one.messages for one in found) == sum(hours.values())
    assert len(found) <= COLUMNS_MAX
