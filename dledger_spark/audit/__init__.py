"""Compares the replicas of a log: which bytes are compared, and whose copy is damaged. Independent of Spark."""
