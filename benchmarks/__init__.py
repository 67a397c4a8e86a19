"""What kvplan costs, each figure beside its limit measured in the same run: `make bench`."""

import os

# BLAS reads these when NumPy loads it. What computes takes one core, so that one is free to copy.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
