"""Tests of the remoting protocol."""
