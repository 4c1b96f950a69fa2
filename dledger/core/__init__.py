"""The protocol, pure: values in, values out; no thread, clock, file, socket or logging.

Every part has ``step(now_ms) -> next due time`` and plain methods for what arrives. A caller holds the node's one lock
around each call; whatever must happen outside it (messages, completions, role changes) is collected in ``Outbox``.
"""
