"""The native layer: lowering, execution and host memory; it knows nothing of kvplan."""

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """Directory to pass to ``cc -I`` so that ``#include "kvnative/backend.h"`` works."""
    package = Path(__file__).parent
    installed = package / "include"
    # A source tree keeps the headers next to the package, a wheel inside it.
    return str(installed if installed.is_dir() else package.parent / "include")
