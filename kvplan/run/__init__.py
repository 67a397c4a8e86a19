"""The launcher `python -m kvplan.run`; only what starts a program may enter."""
