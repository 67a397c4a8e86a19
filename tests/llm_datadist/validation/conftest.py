from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.llm_datadist.validation.environments import Environments


@pytest.fixture(scope="module")
def shared_environments() -> Iterator[Environments]:
    environments = Environments()
    with pytest.MonkeyPatch.context() as patched:
        # the rule is itself a row of the table
        patched.delenv("KVPLAN_SEVERAL_ENGINES", raising=False)
        yield environments
    environments.close()


@pytest.fixture
def environments(shared_environments: Environments) -> Iterator[Environments]:
    yield shared_environments
    shared_environments.after_row()
