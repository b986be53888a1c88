"""Units that multiply under precision assignments, compiled for an H200.

    .venv/bin/python -m benchmarks native_products

The program is the gradient of a GPT with ``precision.apply(..., products="native")``.
FLOP and bytes of operands count all matrix products of a step, as listed by
``precision.products``; "float32" products stay emulated. Calls count the products of
the compiled program, in which a scan over layers counts once. Nothing is run and no GPU
is needed, but the ``gpu-program`` extra is. On a GPU, XLA measures whether cuBLASLt or
Triton is faster for each product. Without a GPU, this benchmark chooses cuBLASLt.
"""

import argparse
import collections

import jax
import jax.numpy as jnp

from benchmarks import records
from lowbit_optax import precision
from tools import hlo
from tools.gpu_program.targets import compile_lowered, gpu_mesh, lower_for
from tools.models.gpt import GPT

MINUTES = 10
NEEDS = ("jax_plugins.xla_cuda12",)

MIB = 2**20
UNITS = ("float8", "bfloat16", "float32")
CUBLAS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    model = GPT(layers=12, width=768, heads=12, context=1024)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((8, model.context + 1), jnp.int32)
    plan = precision.trace(model.loss, params, tokens)
    float8 = precision.FLOAT8
    rows = {
        "all low, `FLOAT8`": precision.uniform(plan, formats=float8),
        "`demote`, r = 0.5, `FLOAT8`": precision.demote(plan, 0.5, formats=float8),
    }
    records.print_rows(
        {"assignment": name, **facts(model, assignment, params, tokens)}
        for name, assignment in rows.items()
    )


def facts(model: GPT, assignment, params, tokens) -> dict[str, str]:
    """Return the figures of an assignment, from its products and compiled programs."""
    products = precision.products(model.loss, assignment, params, tokens)
    flop = collections.Counter()
    for product in products:
        flop[_unit(product.dtypes)] += product.flop
    emulated, native = (
        _compiled(model, assignment, params, tokens, products=products)
        for products in ("emulated", "native")
    )
    calls = collections.Counter(_unit(p.dtypes) for p in hlo.products(native))
    wide = sum(4 * sum(product.sizes) for product in products)
    narrow = sum(product.operand_bytes for product in products)
    memory = (hlo.memory(c).temp_size_in_bytes for c in (emulated, native))
    units = "float8 / bfloat16 / float32"
    return {
        "low ratio": f"{float(assignment.low_ratio):.2f}",
        f"% of FLOP in {units}": " / ".join(
            f"{flop[u] / flop.total():.1%}"[:-1] for u in UNITS
        ),
        "operands, MiB: float32, native": f"{wide / MIB:,.0f}, {narrow / MIB:,.0f}",
        f"calls in {units}": " / ".join(str(calls[u]) for u in UNITS),
        "temporary MiB: emulated, native": ", ".join(
            f"{size / MIB:,.0f}" for size in memory
        ),
    }


def _compiled(model: GPT, assignment, params, tokens, **options):
    rounded = precision.apply(model.loss, assignment, **options)
    gradient = jax.value_and_grad(rounded, has_aux=True)
    return compile_lowered(lower_for(gpu_mesh(), gradient, params, tokens), CUBLAS)


def _unit(dtypes: tuple[str, ...]) -> str:
    """Return the unit that multiplies these dtypes, named as in JAX or in HLO."""
    if all(dtype.startswith(("float8", "f8")) for dtype in dtypes):
        return "float8"
    return "bfloat16" if set(dtypes) <= {"bfloat16", "bf16"} else "float32"
