"""What tools/gpu_check.py consists of."""
