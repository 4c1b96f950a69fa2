"""``dledger bench``: puts load on a running group or its brokers, and measures it."""
