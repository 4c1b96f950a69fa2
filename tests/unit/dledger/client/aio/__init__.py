"""Tests of the asyncio client over remoting."""
