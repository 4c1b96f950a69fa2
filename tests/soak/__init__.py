"""Tests of minutes: clusters, processes killed again and again. ``make soak`` runs them, ``make test`` does not."""
