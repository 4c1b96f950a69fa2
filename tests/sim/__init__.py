"""The deterministic simulator: a whole group in one thread, under virtual time, from one seed.

``python -m tests.sim --seeds 2000`` runs many seeds, ``--seed N --trace`` replays one exactly. Nothing here reads a
clock, starts a thread in a run or iterates over a set, so a seed always gives the same run, on every machine.
"""
