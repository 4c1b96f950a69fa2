"""Classic master-slave replication of a plain commit log, RocketMQ's older way to keep copies."""
