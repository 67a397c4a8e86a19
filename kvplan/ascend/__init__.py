"""Ascend devices: the library found, a device, its memory, and what its product can do."""
