"""The message store: puts, gets, dispatch, recovery, retention and durability, over any commit log."""
