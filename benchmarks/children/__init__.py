"""Programs that the benchmarks run in processes of their own, spoken to through ``processes.PythonChild``."""
