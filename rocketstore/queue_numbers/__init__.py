"""Which queue offset the next message of each queue gets, kept in the log."""
