"""Benchmarks: named figures, each next to a baseline measured in the same run.

``benchmarks.main.run`` is the entry point, ``python -m benchmarks`` the command. ``registry`` lists the scenarios,
``targets`` the limits of their figures, ``peers`` drives the systems they are compared with. To add a figure, write a
scenario, list it in ``registry`` and put its target into ``targets``; the layout of ``bench.json`` stays.
"""
