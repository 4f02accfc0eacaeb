"""From flags to a running plan, for the trainer and the launcher alike."""
