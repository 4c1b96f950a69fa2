"""Consume queues: the positions of each queue's messages in the commit log."""
