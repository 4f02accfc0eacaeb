"""The generators of schedules, one file an algorithm, and the registry that finds them by name."""
