"""Hypothesis profiles: `ci` (default) tries the same examples every time; `explore` new ones.

No test finds an Ascend device by itself, whether this machine has one or a test before it has
loaded the simulated libraries: those that want one ask for the fixture `simulator`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    deadline=None,  # CI machines stall
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

os.environ["KVPLAN_ASCEND_LIBRARY"] = ""
