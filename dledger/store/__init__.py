"""The log on disk and in memory, the hard state, retention and offline inspection.

A damaged log: ``recovery`` decides what a start does with the findings of ``scan``, ``quarantine`` keeps what is taken
out, ``scrub`` finds damage in a running node, and ``repair`` replaces it with a peer's bytes.
"""
