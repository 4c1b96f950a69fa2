"""The replicated log on Spark: a data source and sink named ``dledger``, and the jobs that outgrow one machine."""
