"""The launcher: `python -m kvplan.run script.py` runs a program of llm_datadist on kvplan."""
