"""All measured cases, in the order of the measurement."""

from __future__ import annotations

from tests.llm_datadist.validation import (
    cache_rows,
    config_rows,
    init_rows,
    link_rows,
    transfer_rows,
    value_rows,
)
from tests.llm_datadist.validation.row import Row

ROWS: list[Row] = [
    *config_rows.ROWS,
    *value_rows.ROWS,
    *init_rows.ROWS,
    *cache_rows.ROWS,
    *transfer_rows.ROWS,
    *link_rows.ROWS,
]
