"""Replicas of one log against each other: what is compared, and who is damaged where they differ. Knows no Spark."""
