"""What can go wrong with a job, one class per different reaction."""

from __future__ import annotations

from dledger.errors import DLedgerError


class JobError(DLedgerError):
    """Raised when a job cannot go on; the message says what to do."""


class MissingPartError(JobError):
    """Raised when Spark or Java, which only the pipeline needs, is not on this machine."""


class SparkFailedError(JobError):
    """Raised when Spark gave a job up: the reason without the two stack traces, Java's and Python's."""


class JobBusyError(JobError):
    """Raised when another run writes to the same place."""
