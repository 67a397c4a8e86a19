"""The launcher `python -m kvplan.run`; only code that starts programs belongs here."""
