"""The log on disk and in memory, the hard state, recovery, retention and offline inspection."""
