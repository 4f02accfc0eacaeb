"""Turns a job's flags into the schedules and objects that run the job, for the trainer and for the launcher."""
