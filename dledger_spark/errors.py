"""The pipeline's errors, one class per distinct reaction. Messages say what to do."""

from __future__ import annotations

from dledger.errors import DLedgerError


class PipelineError(DLedgerError):
    """Base class of the pipeline's errors. Pickles, because Spark transfers it from worker to driver."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[type[PipelineError], tuple[str]]:
        return type(self), (str(self),)


class OptionError(PipelineError):
    """Raised for unknown, malformed or contradictory options; lists all problems."""


class SchemaError(PipelineError):
    """Raised for a schema with unknown columns or unsupported types."""


class LogDirectoryError(PipelineError):
    """Raised if a path is not a log directory, or its committed part is unknown."""


class BrokenRecordError(PipelineError):
    """Raised for bytes that are not a complete, undamaged record; names the segment and the offset in it."""


class BadBodyError(PipelineError):
    """Raised for a body that does not fit its schema, with ``badBodies=fail``."""


class DataLossError(PipelineError):
    """Raised if a requested part of the log no longer exists, unless ``failOnDataLoss=false``."""


class JavaMissingError(PipelineError):
    """Raised if Java is missing or too old for Spark."""


class JobError(DLedgerError):
    """Raised when a job cannot continue; the message says what to do."""


class MissingPartError(JobError):
    """Raised when Spark or Java, which only the pipeline needs, is not installed."""


class SparkFailedError(JobError):
    """Raised when Spark aborts a job: the cause, without Java's and Python's stack traces."""


class JobBusyError(JobError):
    """Raised when another run is writing to the same directory."""
