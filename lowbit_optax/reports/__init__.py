"""Reports about memory, about rounding errors, and about the distance from float32."""

from lowbit_optax.reports.diagnostics import LeafReport, StepReport, step_report
from lowbit_optax.reports.donation import Donation, DonationReport, donation
from lowbit_optax.reports.explaining import explain
from lowbit_optax.reports.memory import MemoryReport, memory_report
from lowbit_optax.reports.planning import Plan, PlannedFormats, plan
from lowbit_optax.reports.probing import LeafProbe, Probe, ProbeReport, probe
from lowbit_optax.reports.step_memory import StepMemory, step_memory

__all__ = [
    "Donation",
    "DonationReport",
    "LeafProbe",
    "LeafReport",
    "MemoryReport",
    "Plan",
    "PlannedFormats",
    "Probe",
    "ProbeReport",
    "StepMemory",
    "StepReport",
    "donation",
    "explain",
    "memory_report",
    "plan",
    "probe",
    "step_memory",
    "step_report",
]
