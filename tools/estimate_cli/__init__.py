"""What tools/estimate.py consists of."""
