"""Benchmarks of kvplan; each figure has a limit that is measured in the same run: `make bench`."""

import os

# BLAS reads these when NumPy loads it. Computing takes one core, so that another is free to copy.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
