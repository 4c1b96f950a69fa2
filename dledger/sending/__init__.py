"""Sending reliably: numbered, in order, and with an answer for each thing that was sent.

Entries of a log and messages of a broker go the same way. ``window`` decides what is sent when and what became of it;
it does no input or output and reads no clock, so tests and the simulator drive it through whatever they like.
``numbering`` gives what is sent the numbers by which a server knows it again. ``threads`` and ``aio`` are the
drivers: they carry what the window wants to streams and back.
"""
