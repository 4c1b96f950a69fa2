"""Consumers of messages under everything that happens to them, seeded, against a model of a broker.

``broker`` is the model, ``oracle`` says what was promised, ``worlds`` what happens. ``drivers`` run the real consumers:
over remoting (``remoting`` serves the model), and over gRPC (``ports`` stands for a connection).
"""
