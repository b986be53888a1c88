"""The optimizers that `cifar_optimizers` can train with.

An optimizer has a name `<method>_<family>`; `sgd` and `adamw` are optax, with float32
weights. `args` are the options of `cifar_optimizers`.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import lowbit_optax
from tools.models.resnet import cast_weights

MOMENTUM = 0.9


def _sgd(rate, args) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(args.weight_decay), optax.sgd(rate, MOMENTUM)
    )


def _adamw(rate, args) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=args.weight_decay)


OPTAX = {"sgd": _sgd, "adamw": _adamw}
AROUND_OPTAX = {
    "nearest": functools.partial(
        lowbit_optax.lowbit,
        weights=lowbit_optax.nearest(),
        moments=lowbit_optax.cast(jnp.bfloat16),
    ),
    "master_copy": functools.partial(
        lowbit_optax.lowbit, weights=lowbit_optax.master_copy(), moments="float32"
    ),
}
"""The 16-bit baseline, and mixed precision with a float32 master."""

COMPARED = ("", "nearest_", "sr_", "kahan_", "extra_bits_", "lowbit_")
METHODS = (*COMPARED, "master_copy_")
NAMES = (
    *(method + family for method in METHODS for family in OPTAX),
    *("factored_adamw", "lpmm_sgd", "lpmm_adam"),
)

OPTIONS = ("dtype", "bits", "rounding", "loss_scale")
"""Options of the command line that some optimizers do not support."""

LOSS_SCALES = {
    "backoff": lowbit_optax.loss_scaling.backoff_scale,
    "lognormal": lowbit_optax.loss_scaling.log_normal_scale,
}


def build(
    name: str, rate: optax.ScalarOrSchedule, args: argparse.Namespace, seed: int
) -> optax.GradientTransformation:
    """Return the optimizer `name`, for means of `args.microbatches` gradients.

    Accumulators are float32 for plain optax (`optax.MultiSteps`), and 8-bit otherwise.
    The loss scale is outermost, so the accumulators add unscaled gradients. They skip
    microbatches that overflow, and wait for the next one instead.
    """
    method = name.rpartition("_")[0]
    if is_float32(name):
        tx = OPTAX[name](rate, args)
    elif method in AROUND_OPTAX:
        tx = AROUND_OPTAX[method](OPTAX[family(name)](rate, args))
    else:
        tx = _alias(name, rate, args, seed)
    tx = _accumulated(name, tx, args, seed)
    if args.loss_scale is None:
        return tx
    return lowbit_optax.with_loss_scale(tx, loss_scaling(args.loss_scale))


def _alias(name: str, rate, args, seed: int) -> optax.GradientTransformation:
    """Return the optimizer that has this name in the package."""
    options: dict[str, Any] = {"weight_decay": args.weight_decay, "seed": seed}
    if name.startswith("extra_bits"):
        options |= {"bits": args.bits, "rounding": args.rounding}
    if is_lpmm(name):
        options["rounding"] = args.rounding
    if name.endswith("sgd"):
        options["momentum"] = MOMENTUM
    return getattr(lowbit_optax, name)(rate, **options)


def loss_scaling(choice: str | float) -> lowbit_optax.loss_scaling.Scaling:
    """Return a scaling of `LOSS_SCALES` by name, or a static scale."""
    if choice in LOSS_SCALES:
        return LOSS_SCALES[choice]()
    return lowbit_optax.loss_scaling.static_scale(choice)


def _accumulated(name: str, tx, args, seed: int) -> optax.GradientTransformation:
    if args.microbatches == 1:
        return tx
    if is_float32(name):
        return optax.MultiSteps(tx, args.microbatches).gradient_transformation()
    rounding = args.rounding if is_lpmm(name) else "stochastic"
    sums = lowbit_optax.block_quantized(
        8, code="linear", block_size=2048, rounding=rounding
    )
    # Learning rates apply to means of gradients, as in optax.MultiSteps.
    of_mean = optax.chain(optax.scale(1 / args.microbatches), tx)
    return lowbit_optax.accumulate_gradients(
        of_mean, args.microbatches, sums, seed=seed
    )


def weight_storage(name: str, args: argparse.Namespace) -> Callable[[Any], Any]:
    """Return the function that converts float32 parameters for an optimizer."""
    if is_lpmm(name):
        return functools.partial(lowbit_optax.lpmm.quantize_params, bits=args.bits)
    dtype = "float32" if is_float32(name) else args.dtype
    return functools.partial(cast_weights, dtype=jnp.dtype(dtype))


def family(name: str) -> str:
    """Return `"sgd"` or `"adamw"`: the family whose defaults the optimizer uses."""
    return "sgd" if name.endswith("sgd") else "adamw"


def compared(name: str) -> list[str]:
    """Return the optimizers that `--compare` trains, float32 first."""
    return [method + family(name) for method in COMPARED]


def is_float32(name: str) -> bool:
    """Return whether `name` is plain optax, with float32 weights."""
    return name in OPTAX


def is_lpmm(name: str) -> bool:
    """Return whether `name` trains QuantizedTensors, which have bits but no dtype."""
    return name.startswith("lpmm_")


def options_of(name: str) -> set[str]:
    """Return the `OPTIONS` that the optimizer `name` supports."""
    if is_float32(name):
        return {"loss_scale"}
    if is_lpmm(name):
        return {"bits", "rounding"}
    has_extra = name.startswith("extra_bits")
    return {"dtype", "loss_scale"} | ({"bits", "rounding"} if has_extra else set())
