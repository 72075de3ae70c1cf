"""A CPU emulator for the CUDA source that schedules emit: check a kernel without a GPU.

Read first: `run_schedule`. At work: `python -m tests.emulator kron --m 4 --factors 8x8,8x8 --dtype float16 --schedule NAME`.
What it models and what not: run.py, runtime/scheduler.cpp, runtime/memory.cpp.
"""

from tests.emulator.errors import EmulatorError
from tests.emulator.run import ORDERS, run_lowered, run_schedule

__all__ = ["ORDERS", "EmulatorError", "run_lowered", "run_schedule"]
