"""Consume queues and the key index, derived again from the log."""
