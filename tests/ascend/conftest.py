from tests.ascend.fixtures import sim_folder, sim_log, simulator

__all__ = ["sim_folder", "sim_log", "simulator"]
