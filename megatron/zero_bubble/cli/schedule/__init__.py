"""The parts of `zero-bubble schedule`."""
