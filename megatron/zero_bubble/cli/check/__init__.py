"""The parts of `zero-bubble check`."""
