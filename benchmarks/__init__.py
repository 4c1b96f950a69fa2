"""Benchmarks: named figures, each beside a baseline that was measured in the same run.

``benchmarks.main.run`` is the entry, ``python -m benchmarks`` the command. ``registry`` lists the scenarios,
``targets`` what their figures must hold, ``peers`` drives the systems they are compared with. Whoever adds a figure
writes a scenario, lists it in ``registry`` and puts its target into ``targets``; the layout of ``bench.json`` stays.
"""
