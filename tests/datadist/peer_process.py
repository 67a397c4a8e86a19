"""An engine in a process of its own, told what to do line by line: see `serve`."""

import numpy as np

import kvplan
from tests.transport.owner_process import serve

if __name__ == "__main__":
    serve({"np": np, "kvplan": kvplan, **{name: getattr(kvplan, name) for name in kvplan.__all__}})
