"""Generators of the named schedules that need no costs; each file generates one family of schedules."""
