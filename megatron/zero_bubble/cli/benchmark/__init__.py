"""The parts of `zero-bubble benchmark`."""
