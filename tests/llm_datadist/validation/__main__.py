"""`python -m tests.llm_datadist.validation` writes the page of differences anew."""

from tests.llm_datadist.validation.page import write

write()
