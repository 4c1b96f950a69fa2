"""Timed messages: the files that say when each is due, and the table from which a leader delivers them."""
