"""Planted bugs that the tests must catch: ``make mutants`` puts each into a copy and reports which test caught it."""
