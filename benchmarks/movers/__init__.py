"""Programs of two ends that move the paged work, each with one library; see `benchmarks.pairs`.

Those of peers run in an environment of their own: nothing here but `engine` imports kvplan.
"""
