"""Reliable, ordered sending with one outcome per item.

Log entries and broker messages share this path. ``window`` decides what is sent when and records the outcomes; it does
no I/O and reads no clock, so tests and the simulator drive it directly. ``batch`` has the items, with the sequence
numbers by which a server recognizes repeats. ``aio`` is the driver that connects a window to streams.
"""
