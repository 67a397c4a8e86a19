"""What cannot be tested under emulation is in the document too."""

from pathlib import Path

import pytest

from tests.support.emulated import LACKS, Lack

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/aarch64.md"


@pytest.mark.parametrize("lack", LACKS, ids=[it.what for it in LACKS])
def test_the_document_has_it(lack: Lack) -> None:
    assert f"| {lack.what} | {lack.why} |" in DOCUMENT.read_text()


@pytest.mark.parametrize("lack", LACKS, ids=[it.what for it in LACKS])
def test_its_files_are_there(lack: Lack) -> None:
    for pattern in lack.tests:
        assert (DOCUMENT.parents[2] / pattern.partition("::")[0]).is_file()
