"""State machines on the log: committed entries applied in order, with results, queries and snapshots.

``ports`` is what an application implements; ``applier`` runs it; ``snapshots`` keeps its state on disk. Rules, named
S1 to S12: docs/guarantees.md.
"""
