"""The format ``dledger`` for Spark: readers (batch, live, stream) and writers."""
