"""What the tools share that start trainings, or reason about them, from pretrain_gpt.py's flags."""
