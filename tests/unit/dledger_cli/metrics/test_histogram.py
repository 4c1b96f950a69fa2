"""Counting values into buckets as Prometheus wants them."""

from __future__ import annotations

import threading

from dledger_cli.metrics.recorder import Histogram, cumulative


def test_a_value_is_counted_in_every_bucket_that_it_does_not_exceed() -> None:
    """Prometheus's ``le``: a bound belongs to its own bucket, and +Inf holds all."""
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        histogram.observe(value)

    assert histogram.read() == ([("1.0", 2), ("10.0", 4), ("+Inf", 5)], 24)


def test_no_value_is_lost_between_threads() -> None:
    """Appends are answered on whichever thread commits them."""
    histogram = Histogram((1,))

    def observe() -> None:
        for _ in range(5000):
            histogram.observe(1)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert histogram.read() == ([("1.0", 20_000), ("+Inf", 20_000)], 20_000)


def test_counts_that_others_keep_become_buckets() -> None:
    """The store counts puts in RocketMQ's buckets already."""
    assert cumulative((0.5, 2), [3, 0, 4]) == [("0.5", 3), ("2.0", 3), ("+Inf", 7)]
