"""The launcher `python -m kvplan.run`; only code that starts programs may enter."""
