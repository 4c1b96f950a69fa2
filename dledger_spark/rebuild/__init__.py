"""Derives consume queues and the key index from a log, as a broker does. Independent of Spark.

The rules are those of ``rocketstore.consume_queue`` and ``rocketstore.index``, with which tests compare every byte;
here they are applied to many thousand records at a time.
"""
