"""Programs that the benchmarks run as separate processes, controlled through ``processes.PythonChild``."""
