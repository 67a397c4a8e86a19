"""What kvplan costs, each figure beside its limit measured in the same run: `make bench`."""
