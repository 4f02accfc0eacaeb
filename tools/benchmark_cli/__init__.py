"""What tools/benchmark_schedules.py and tools/benchmark_overhead.py consist of."""
