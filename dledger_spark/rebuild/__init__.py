"""What a broker derives from its log, derived again: consume queues and the key index. Knows no Spark.

The rules are those of ``rocketstore.consume_queue`` and ``rocketstore.index``, with which tests compare every byte;
here they are worked out for many thousand records at a time.
"""
