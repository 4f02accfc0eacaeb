"""Turns a job's flags into a running plan, for the trainer and the launcher alike."""
