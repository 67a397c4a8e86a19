"""Programs with two ends that do the paged work, each with one library; see `benchmarks.pairs`.

Programs of other libraries run in another environment: only `engine` imports kvplan.
"""
