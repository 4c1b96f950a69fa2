"""The message store: puts, gets, dispatch, recovery, retention and durability, for any commit log."""
