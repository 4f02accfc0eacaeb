"""Generators of the named schedules that need no costs: a file of pure functions for each family of schedules."""
