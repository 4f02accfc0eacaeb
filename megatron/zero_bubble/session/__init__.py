"""Turns a job's flags into a running plan; the trainer and the launcher both use this package."""
