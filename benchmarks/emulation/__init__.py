"""The parts of `python -m benchmarks.emulate`, which runs schedules for real with sleeps in place of compute."""
