"""The jobs within Spark, on logs that the store has written."""
