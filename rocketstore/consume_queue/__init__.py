"""Where the messages of each queue lie in the commit log."""
