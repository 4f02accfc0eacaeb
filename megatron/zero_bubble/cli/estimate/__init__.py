"""The parts of `zero-bubble estimate`."""
