"""The log and the checks of arguments, which all modules of the package share."""
