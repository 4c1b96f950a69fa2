"""The broker behind RocketMQ's remoting protocol."""
