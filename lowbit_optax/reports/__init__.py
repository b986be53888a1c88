"""Reports about memory, before and after compiling, and about rounding errors."""

from lowbit_optax.reports.diagnostics import LeafReport, StepReport, step_report
from lowbit_optax.reports.explaining import explain
from lowbit_optax.reports.memory import MemoryReport, memory_report
from lowbit_optax.reports.planning import Plan, PlannedFormats, plan
from lowbit_optax.reports.step_memory import StepMemory, step_memory

__all__ = [
    "LeafReport",
    "MemoryReport",
    "Plan",
    "PlannedFormats",
    "StepMemory",
    "StepReport",
    "explain",
    "memory_report",
    "plan",
    "step_memory",
    "step_report",
]
