"""The pipeline without Spark: options, decoding, reports."""
