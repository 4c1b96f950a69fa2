"""The JSON bodies, by subject; member names are RocketMQ's."""
