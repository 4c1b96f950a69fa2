"""Consumers of messages under everything that happens to them, seeded, against a model of a broker.

``broker`` is the model, which ``remoting`` serves; ``oracle`` says what was promised, ``worlds`` what happens, and
``drivers`` run the real consumers.
"""
