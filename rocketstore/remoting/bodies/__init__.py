"""The bodies that are JSON, by whom they are about; the names of their members are RocketMQ's."""
