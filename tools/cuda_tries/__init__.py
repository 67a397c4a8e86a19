"""What tools/try_cuda.py tries; each in a process of its own."""
