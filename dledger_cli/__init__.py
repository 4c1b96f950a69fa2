"""The ``dledger`` command, the console, metrics, the demo, and groups of local processes."""
