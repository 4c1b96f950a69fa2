"""The jobs' errors, one class per distinct reaction."""

from __future__ import annotations

from dledger.errors import DLedgerError


class JobError(DLedgerError):
    """Raised when a job cannot continue; the message says what to do."""


class MissingPartError(JobError):
    """Raised when Spark or Java, which only the pipeline needs, is not installed."""


class SparkFailedError(JobError):
    """Raised when Spark aborts a job: the cause, without Java's and Python's stack traces."""


class JobBusyError(JobError):
    """Raised when another run is writing to the same directory."""
