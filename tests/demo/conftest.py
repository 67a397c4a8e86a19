"""Fixtures of the demo's tests: model files, and the simulated device."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.disaggregated.requirements import SetupError, check_installed, weights_path
from examples.disaggregated.tokenizer import Tokenizer
from examples.disaggregated.weights import ModelFile
from tests.ascend.fixtures import sim_folder, sim_log, simulator
from tests.demo import tiny_gguf

__all__ = ["sim_folder", "sim_log", "simulator"]


@pytest.fixture(scope="session")
def model_file() -> ModelFile:
    """The opened file of the real model."""
    try:
        check_installed()
    except SetupError as error:
        pytest.skip(f"the demo cannot run: {error}")
    return ModelFile(weights_path())


@pytest.fixture(scope="session")
def tokenizer(model_file: ModelFile) -> Tokenizer:
    return Tokenizer(model_file)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Iterator[None]:
    """A model with which the demo starts at once; only `test_the_demo` runs the real one."""
    with tiny_gguf.installed(tmp_path):
        yield
