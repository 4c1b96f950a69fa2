"""The format ``dledger`` for Spark: what reads (batch, live, stream) and what writes."""
