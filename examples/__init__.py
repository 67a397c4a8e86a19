"""Programs that show kvplan at work; each folder is one, run with `python -m examples.<name>`."""
