"""Benchmarks, the speed test, sensors, and the reading of machine code."""
