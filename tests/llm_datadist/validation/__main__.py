"""`python -m tests.llm_datadist.validation` writes the page of differences."""

from tests.llm_datadist.validation.page import write

write()
