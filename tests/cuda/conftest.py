from __future__ import annotations

from tests.cuda_sim.simulator import cuda_simulator, sim_folder

__all__ = ["cuda_simulator", "sim_folder"]
