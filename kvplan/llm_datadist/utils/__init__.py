"""The log and the argument checks that all modules of the package share."""
