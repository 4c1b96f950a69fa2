"""The commands of ``dledger``, one module per subject."""
