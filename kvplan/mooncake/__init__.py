"""The Python interface of Mooncake's transfer engine, over kvplan's: `mooncake.engine`.

Only names, checks and conversions may enter; bytes move by the verbs of `LlmDataDist`. Programs
import `mooncake.engine` under `python -m kvplan.run --as mooncake`.
"""
