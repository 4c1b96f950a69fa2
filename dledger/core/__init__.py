"""The protocol, pure: values in, values out; no thread, clock, file, socket or logging.

Every part has ``step(now_ms) -> next due time`` and plain methods for incoming events. Callers hold the node's one lock
around each call; effects outside it (messages, completions, role changes) are collected in ``Outbox``.
"""
