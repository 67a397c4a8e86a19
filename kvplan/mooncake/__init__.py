"""The Python interface of Mooncake's transfer engine, `mooncake.engine`, over kvplan's engine.

This package has only names, checks and conversions; `LlmDataDist` moves the bytes. Programs
import `mooncake.engine` under `python -m kvplan.run --as mooncake`.
"""
