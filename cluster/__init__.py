"""Deployment files, and drills that break a group on purpose: the repository's own, not installed."""
