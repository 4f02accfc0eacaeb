"""The faults of each part of the project."""
