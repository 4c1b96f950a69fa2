"""Deterministic simulation of whole brokers: ``python -m tests.sim_store``, or ``make sim-store``.

``tests.sim`` runs the protocol over a model of the store. Here everything that a broker keeps runs as it is, with all
its threads: commit log, consume queues, index, broker state, delayed delivery, retention. ``threads`` lets one of the
threads run at a time, as a seed decides, under virtual time; ``disk`` is what they write to.
"""
