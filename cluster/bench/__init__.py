"""``dledger bench``: load for a running group or its brokers, and how it bore it."""
