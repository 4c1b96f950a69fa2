"""Consumers of messages under everything that happens to them, seeded, against a model of a broker.

``broker`` is the model, ``oracle`` says what was promised, ``worlds`` what happens. ``drivers`` run the real consumers:
another client needs only another driver, and what stands for its connection (``ports`` does for gRPC).
"""
