"""The parts of `python -m benchmarks.emulate`, which runs schedules in processes that sleep instead of computing."""
