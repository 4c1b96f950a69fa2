"""Replicas against each other."""
