"""Tests of the log over remoting."""
