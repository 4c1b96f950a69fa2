"""The next queue offset of every queue, stored in the log."""
