"""The tries of tools/try_cuda.py; each runs in a process of its own."""
