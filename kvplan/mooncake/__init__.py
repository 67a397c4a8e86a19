"""The Python interface of Mooncake's transfer engine, `mooncake.engine`, over kvplan's engine.

Programs import `mooncake.engine` under `python -m kvplan.run --as mooncake`. Logic of transfers
does not belong here.
"""
