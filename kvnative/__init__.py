"""The native layer: lowering, execution and memory. It does not import kvplan."""

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """Return the directory for ``cc -I`` with which ``#include "kvnative/backend.h"`` works."""
    package = Path(__file__).parent
    installed = package / "include"
    # Next to the package in a source tree, inside the package in a wheel.
    return str(installed if installed.is_dir() else package.parent / "include")
