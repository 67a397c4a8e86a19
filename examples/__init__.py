"""Programs that show kvplan at work, run with `python -m examples.<name>`."""
