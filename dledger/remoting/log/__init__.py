"""The log over remoting: DLedger's requests, as its Java client sends them, and ours."""
