"""What can go wrong in the pipeline, one class per different reaction. Messages say what to do."""

from __future__ import annotations

from dledger.errors import DLedgerError


class PipelineError(DLedgerError):
    """The base of every error of the pipeline. Pickles, since Spark carries it from worker to driver."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[type[PipelineError], tuple[str]]:
        return type(self), (str(self),)


class OptionError(PipelineError):
    """Raised for options that are unknown, malformed or contradict each other; lists all problems."""


class SchemaError(PipelineError):
    """Raised for a schema that asks for columns or types that there are not."""


class LogDirectoryError(PipelineError):
    """Raised when a path is no log directory, or one whose committed part cannot be told."""


class BrokenRecordError(PipelineError):
    """Raised for bytes that are no whole, undamaged record; names the segment and the offset in it."""


class DataLossError(PipelineError):
    """Raised when a part of the log that was asked for is no longer there, unless ``failOnDataLoss=false``."""


class JavaMissingError(PipelineError):
    """Raised when there is no Java for Spark, or too old a one."""
