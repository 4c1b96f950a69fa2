"""Planted bugs: small patches that the tests must catch. ``make mutants`` applies each to a copy and says what did."""
