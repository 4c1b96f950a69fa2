"""Worlds in which groups consume by pop: the real tables and engine, with a model of everything around them."""
