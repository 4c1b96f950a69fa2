"""RocketMQ's transactional messages: a half message waits, unseen, until its producer commits it or rolls it back."""
