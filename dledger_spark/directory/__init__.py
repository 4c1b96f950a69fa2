"""A log on disk: its files, their committed part, the splits, and how these are read."""

from dledger_spark.directory.files import IndexFiles, LogSegment
from dledger_spark.directory.log import LogDirectory, TimeBounds, locate, open_directory, range_of, within_times
from dledger_spark.directory.splits import RecordRun, Split, SplitSizes, plan_splits, read_split, runs

__all__ = [
    "IndexFiles",
    "LogDirectory",
    "LogSegment",
    "RecordRun",
    "Split",
    "SplitSizes",
    "TimeBounds",
    "locate",
    "open_directory",
    "plan_splits",
    "range_of",
    "read_split",
    "runs",
    "within_times",
]
