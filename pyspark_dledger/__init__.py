"""Spark looks into modules of this kind of name for data sources, so that ``format("dledger")`` needs no registration."""
