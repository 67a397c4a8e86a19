"""The tests in docs/how-to/testing.md are run as a user's file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.testing.folder import ALREADY_IMPORTED

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/testing.md"


def code() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    return "\n\n".join(block for block in blocks if ">>>" not in block)


def test_the_examples_of_the_page_pass_and_fail_as_documented(pytester: pytest.Pytester) -> None:
    text = code()
    assert text.count("def test_") == 2
    quiet = "-W", ALREADY_IMPORTED
    pytester.makepyfile(test_shown=text)
    pytester.runpytest_inprocess("--kvplan-update", *quiet).assert_outcomes(passed=4)
    pytester.runpytest_inprocess(*quiet).assert_outcomes(passed=4)
    # A connector that forgets where the cached tokens end at its own side.
    wrong = text.replace("mine, first_token=num_cached", "mine, first_token=0")
    assert wrong != text
    pytester.makepyfile(test_shown=wrong)
    pytester.runpytest_inprocess(*quiet).assert_outcomes(failed=4)
    # An allocator that scatters.
    scattered = text.replace("[14, 4, 21, 22, 23, 24,", "[14, 4, 21, 20, 19, 18,")
    assert scattered != text
    pytester.makepyfile(test_shown=scattered)
    found = pytester.runpytest_inprocess("--kvplan-update", *quiet, "-k", "others")
    found.assert_outcomes(failed=1, deselected=3)
    found.stdout.fnmatch_lines(["kvplan: 1 of 1 plan over budget: 32 descriptors, max_desc*=20"])
