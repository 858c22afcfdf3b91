"""The steps of benchmarks/gpu_smoke.py. Each module has functions that take a `Where` and return rows."""
