"""Compare the results of kernels with the reference, bit by bit.

Each family of formats runs two steps on several sets of leaves: with Triton's kernels,
with Mosaic's, and with XLA on the device. The reference is XLA on the CPU. If all
hyperparameters of a family are powers of two, its products are exact and no bit may
differ. Some families round, so their results may differ: the aliases with their own
hyperparameters, the square roots of second moments, and momentum that carries rounding
errors of the weights, because it divides by the scale of a block. For these families,
the record only counts the values that differ.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax as lo
from benchmarks.device.job import Job
from lowbit_optax import release
from pallas_kernels import platforms

MOMENTUM = optax.sgd(2.0**-10, momentum=0.5)
SQUARES = optax.chain(
    optax.scale_by_rms(decay=0.5, eps=2.0**-20), optax.scale(-(2.0**-6))
)
BFLOAT16 = lo.cast(jnp.bfloat16)


class Family(typing.NamedTuple):
    """A combination of weight and moment formats.

    Attributes:
      make: a function that returns a transformation, with a keyword ``implementation``.
      exact: whether every bit must be equal to the reference.
      quantised: whether the parameters are QuantizedTensors.
    """

    make: Callable
    exact: bool = True
    quantised: bool = False


def _of(inner, weights, moments, exact=True) -> Family:
    make = functools.partial(lo.lowbit, inner, weights=weights, moments=moments)
    return Family(make, exact)


def _preset(alias: Callable, quantised=False, **options) -> Family:
    make = functools.partial(alias, 2.0**-10, **options)
    return Family(make, exact=False, quantised=quantised)


EIGHT = lo.block_quantized(8)
FAMILIES = {
    "extra_bits(8), 8-bit momentum": _of(MOMENTUM, lo.extra_bits(8), EIGHT),
    "extra_bits(8), 8-bit squares": _of(SQUARES, lo.extra_bits(8), EIGHT, exact=False),
    "lowbit_adamw": _preset(lo.lowbit_adamw),
    "factored_adamw": _preset(lo.factored_adamw, min_dim_size_to_factor=64),
    "lpmm_adam": _preset(lo.lpmm_adam, quantised=True),
    "kahan": _of(MOMENTUM, lo.kahan(), BFLOAT16),
    "stochastic_rounding": _of(MOMENTUM, lo.stochastic_rounding(), BFLOAT16),
    "stochastic_rounding, error into momentum": _of(
        MOMENTUM, lo.stochastic_rounding(error_feedback="trace"), EIGHT, exact=False
    ),
    "extra_bits(16)": _of(MOMENTUM, lo.extra_bits(16), "float32"),
    "extra_bits(8)": _of(MOMENTUM, lo.extra_bits(8), "float32"),
}
"""Families by name, in the order in which they run."""

LARGE = {
    "even": ((1024, 1024),),
    "ragged": ((1000, 257), (7, 5, 643), (4097,)),
    "many": ((256, 128),) * 8 + ((40,),) * 8,
    "stacked": ((4, 256, 256),),
}
SMALL = {
    "even": ((64, 64),),
    "ragged": ((70, 61),),
    "many": ((64, 64),) * 3 + ((40,),) * 3,
    "stacked": ((2, 64, 64),),
}
STEPS = 2


def implementations(job: Job) -> list[str]:
    """Return the implementations to compare with the reference, the default first."""
    if not job.for_gpus:
        return ["pallas"]
    with job.target_mesh():
        gpu = platforms.target_gpu()
    takes_mosaic = platforms.has_mosaic() and gpu is not None and gpu.major in (9, 10)
    return ["triton", *(["mosaic"] if takes_mosaic else []), "xla"]


def step_of(tx, stacked: bool) -> Callable:
    """Return a step, which updates a stack layer by layer inside the backward pass."""
    if not stacked:
        return lambda params, state, grads: lo.step(tx, params, state, grads)

    def loss_fn(params, grads):
        # The loss is linear in the weights, so the gradients are exactly ``grads``.
        def body(total, layer):
            weights, grad = layer
            products = lo.lpmm.dequantize(weights, jnp.float32) * grad.astype(
                jnp.float32
            )
            return total + products.sum(), None

        total, _ = jax.lax.scan(body, jnp.float32(0), (params[0], grads[0]))
        return total

    released = release.value_and_update(loss_fn, tx)

    def step(params, state, grads):
        _, params, state = released(params, state, grads)
        return params, state

    return step


@functools.cache
def start(family: Family, kind: str, small: bool) -> tuple:
    """Return parameters and state on the CPU, and gradients.

    Gradients have 8 significant bits, so their squares and sums are exact.
    """
    shapes = (SMALL if small else LARGE)[kind]
    rng = np.random.default_rng(0)
    bfloat16 = lambda x: jnp.asarray(x).astype(jnp.bfloat16)
    with on_cpu():
        params = [bfloat16(rng.standard_normal(s, np.float32)) for s in shapes]
        grads = [bfloat16(rng.integers(-128, 128, s) / 512.0) for s in shapes]
        if family.quantised:
            params = lo.lpmm.quantize_params(params)
        return params, family.make(implementation="xla").init(params), grads


@functools.cache
def reference(family: Family, kind: str, small: bool) -> tuple:
    """Return parameters and state after the steps, which XLA computes on the CPU."""
    step = step_of(family.make(implementation="xla"), kind == "stacked")
    with on_cpu():
        return trained(jax.jit(step), *start(family, kind, small))


def on_cpu():
    """Return a context in which JAX uses the CPU, whatever other devices it has."""
    return jax.default_device(jax.devices("cpu")[0])


def differing(got, want) -> int:
    """Return the number of elements of two trees that differ in any bit."""
    count = 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        unsigned = f"u{a.dtype.itemsize}"
        count += int(np.count_nonzero(a.view(unsigned) != b.view(unsigned)))
    return count


def furthest(got, want) -> float:
    """Return the largest error of a weight, divided by its leaf's largest weight."""
    wide = functools.partial(lo.lpmm.dequantize, dtype=jnp.float32)
    with on_cpu():
        a, b = (jax.tree.leaves(wide(jax.tree.map(np.asarray, x))) for x in (got, want))
    pairs = [(np.float32(x), np.float32(y)) for x, y in zip(a, b, strict=True)]
    return float(max(abs(x - y).max() / abs(y).max() for x, y in pairs))


def trained(step, params, state, grads):
    """Return parameters and state after ``STEPS`` steps, on the host."""
    for _ in range(STEPS):
        params, state = step(params, state, grads)
    return jax.tree.map(np.asarray, (params, state))


def compare(job: Job, family: Family, kind: str, implementation: str) -> dict:
    """Compile the steps. If they run here, count differences from the reference."""
    params, state, grads = start(family, kind, job.small)
    tx = family.make(implementation=implementation)
    step = step_of(tx, kind == "stacked")
    compiled = job.compile(f"{kind}, {implementation}", step, params, state, grads)
    if not job.runs:
        return {}
    want = reference(family, kind, job.small)
    on_device = jax.device_put((params, state, grads), jax.devices()[0])
    got = trained(compiled, *on_device)
    return {
        "exact": family.exact,
        "parameters": differing(got[0], want[0]),
        "state": differing(got[1], want[1]),
        "furthest": furthest(got[0], want[0]),
        "elements": sum(x.size for x in grads),
    }


def run(job: Job, name: str) -> None:
    """Run all comparisons of a family."""
    for implementation in implementations(job):
        for kind in LARGE:
            measure = functools.partial(
                compare, job, FAMILIES[name], kind, implementation
            )
            job.attempt(f"{kind}, {implementation}", measure)
