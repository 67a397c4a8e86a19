"""How the memory of another process is reached, one file for each way."""
