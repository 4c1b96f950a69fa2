"""The log on disk and in memory, the hard state, retention and offline inspection.

A damaged log: ``recovery`` reads the files at a start and decides about its findings, ``quarantine`` keeps what is
taken out, and ``repair`` finds damage in a running node and replaces it with a peer's bytes.
"""
