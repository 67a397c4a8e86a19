"""The `get_logger` of NIXL's module."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Return a logger of the standard library."""
    return logging.getLogger(name)
