"""Generators of the named schedules that need no costs: one file with pure functions for each family."""
