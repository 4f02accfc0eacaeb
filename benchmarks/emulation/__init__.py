"""The parts of `python -m benchmarks.emulate`: schedules run for real, with sleeps in place of compute."""
