"""A stopped group member's log as a plain broker's directory, which RocketMQ lacks: the way back from a group."""
