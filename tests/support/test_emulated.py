"""The document lists the same features that cannot be tested under emulation."""

from pathlib import Path

import pytest

from tests.support.emulated import LACKS, Lack

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/how-to/aarch64.md"


@pytest.mark.parametrize("lack", LACKS, ids=[item.what for item in LACKS])
def test_the_document_lists_each_lack(lack: Lack) -> None:
    assert f"| {lack.what} | {lack.why} |" in DOCUMENT.read_text()


@pytest.mark.parametrize("lack", LACKS, ids=[item.what for item in LACKS])
def test_files_of_each_lack_exist(lack: Lack) -> None:
    for pattern in lack.tests:
        assert (ROOT / pattern.partition("::")[0]).is_file()
