"""What tools/schedule.py consists of."""
