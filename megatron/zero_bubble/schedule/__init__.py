"""What runs when: schedules as values, their costs, their bubbles. Pure Python, no torch."""
