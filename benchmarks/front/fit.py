"""The largest models that fit into GPUs of 24, 48, 80 and 141 GB, with AdamW.

    .venv/bin/python -m benchmarks fit

The bytes per parameter are those that ``lowbit_optax.plan`` counts for Llama 3.1 8B:
parameters, optimizer state and bfloat16 gradients. The table assumes that they may fill
80% of the memory, and that activations and temporary arrays need the rest. Nothing is
compiled or run.
"""

import optax

import lowbit_optax
from benchmarks import records
from tools.models.llama import Llama

MEMORY = (24, 48, 80, 141)
"""GB (10^9 bytes) of each GPU."""
SHARE = 0.8
MASTER = "AdamW, float32 master"
COLUMNS = {
    MASTER: None,
    "`kahan_adamw`": ("kahan", False),
    "`lowbit_adamw`": ("lowbit", False),
    "`lowbit_adamw`, release": ("lowbit", True),
    "`factored_adamw`, release": ("factored_adamw", True),
}
"""The row of the plan of each column, and whether the step releases gradients."""
MORE = {
    "`extra_bits_adamw`": ("extra_bits", False),
    "`lpmm_adam`, release": ("lpmm, 12 bits", True),
}
"""Rows of the plan that only ``docs/choosing.md`` shows."""


def measure(args) -> dict:
    """Return bytes per parameter, with gradients, for each column."""
    del args
    shapes = Llama().shapes()
    stacked = lambda path: path.startswith("['layers']")
    planned = lowbit_optax.plan(shapes, 80e9, stacked=stacked)
    size = planned["lowbit"].report.total.size
    master = lowbit_optax.memory_report(optax.adamw(1e-4), shapes).total
    found = {MASTER: master.float32_master / size + 2}
    for name, row in (COLUMNS | MORE).items():
        if row is not None:
            formats, release = row
            found[name] = planned[formats].bytes_per_device(release) / size
    return {"parameters": size, "bytes_per_parameter": found}


def billions(bytes_per_parameter: float, gigabytes: float) -> float:
    """Return how many billion parameters fit."""
    return SHARE * gigabytes / bytes_per_parameter


def text(record: dict) -> str:
    sizes = record["bytes_per_parameter"]
    rows = [
        (f"{memory} GB", *(f"{billions(sizes[x], memory):.1f}" for x in COLUMNS))
        for memory in MEMORY
    ]
    return records.table(["GPU memory", *COLUMNS], rows)


main = records.program(__name__, ran="CPU, from shapes alone")
