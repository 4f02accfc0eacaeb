"""The schedules that need no costs: one file with one pure function for each family."""
