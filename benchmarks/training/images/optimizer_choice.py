"""The optimizers that `cifar_optimizers` can train with, and their labels."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

import lowbit_optax
from tools.models.resnet import cast_weights


class Options(NamedTuple):
    """The options of all optimizers below.

    `rounding` applies to LPMM and extra bits. If it is None, each uses its default.
    """

    learning_rate: optax.ScalarOrSchedule
    weight_decay: float
    bits: int
    seed: int
    rounding: str | None = None
    microbatches: int = 1
    loss_scale: str | float | None = None
    momentum: float = 0.9


def _sgd(o: Options) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(o.weight_decay),
        optax.sgd(o.learning_rate, o.momentum),
    )


def _adamw(o: Options) -> optax.GradientTransformation:
    return optax.adamw(o.learning_rate, weight_decay=o.weight_decay)


def _nearest(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the 16-bit baseline, which rounds weights to nearest."""
    return lowbit_optax.lowbit(
        inner,
        weights=lowbit_optax.nearest(),
        moments=lowbit_optax.cast(jnp.bfloat16),
    )


def _master_copy(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns mixed precision with a float32 master and float32 moments."""
    return lowbit_optax.lowbit(
        inner, weights=lowbit_optax.master_copy(), moments="float32"
    )


def _alias(name: str, o: Options) -> optax.GradientTransformation:
    """Returns the optimizer that has this name in the package."""
    options: dict[str, Any] = {"weight_decay": o.weight_decay, "seed": o.seed}
    if name.startswith("extra_bits"):
        options |= {"bits": o.bits, "rounding": o.rounding}
    if is_lpmm(name):
        options["rounding"] = o.rounding
    if name.endswith("sgd"):
        options["momentum"] = o.momentum
    return getattr(lowbit_optax, name)(o.learning_rate, **options)


LABELS = {
    "sgd": "float32",
    "adamw": "float32",
    "nearest_sgd": "nearest",
    "nearest_adamw": "nearest",
    "master_copy_sgd": "float32 master",
    "master_copy_adamw": "float32 master",
    "sr_sgd": "stochastic",
    "sr_adamw": "stochastic",
    "kahan_sgd": "Kahan",
    "kahan_adamw": "Kahan",
    "extra_bits_sgd": "extra bits",
    "extra_bits_adamw": "extra bits",
    "lowbit_sgd": "lowbit",
    "lowbit_adamw": "lowbit",
    "factored_adamw": "factored",
    "lpmm_sgd": "LPMM",
    "lpmm_adam": "LPMM",
}
"""Labels by name (`<method>_<family>`, `lpmm_adam`). `sgd` and `adamw` are optax."""

BUILT_HERE = {
    "sgd": _sgd,
    "adamw": _adamw,
    "nearest_sgd": lambda o: _nearest(_sgd(o)),
    "nearest_adamw": lambda o: _nearest(_adamw(o)),
    "master_copy_sgd": lambda o: _master_copy(_sgd(o)),
    "master_copy_adamw": lambda o: _master_copy(_adamw(o)),
}
"""Optimizers that are built here; all others are optimizers of the package."""

OPTIONS = ("dtype", "bits", "rounding", "loss_scale")
"""Options of the command line that some optimizers do not support."""

LOSS_SCALES = {
    "backoff": lowbit_optax.loss_scaling.backoff_scale,
    "lognormal": lowbit_optax.loss_scaling.log_normal_scale,
}

COMPARED = ("", "nearest_", "sr_", "kahan_", "extra_bits_", "lowbit_")


def build(name: str, options: Options) -> optax.GradientTransformation:
    """Returns the optimizer `name`, for means of `options.microbatches` gradients.

    Accumulators are float32 for plain optax (`optax.MultiSteps`), and 8-bit otherwise.
    The loss scale is outermost, so the accumulators add unscaled gradients. They skip
    microbatches that overflow, and wait for the next one instead.
    """
    make = BUILT_HERE.get(name, functools.partial(_alias, name))
    tx = _accumulated(name, make(options), options)
    if options.loss_scale is None:
        return tx
    return lowbit_optax.with_loss_scale(tx, loss_scaling(options.loss_scale))


def loss_scaling(choice: str | float) -> lowbit_optax.loss_scaling.Scaling:
    """Returns a scaling of `LOSS_SCALES` by name, or a static scale."""
    if choice in LOSS_SCALES:
        return LOSS_SCALES[choice]()
    return lowbit_optax.loss_scaling.static_scale(choice)


def _accumulated(
    name: str, tx: optax.GradientTransformation, options: Options
) -> optax.GradientTransformation:
    if options.microbatches == 1:
        return tx
    if is_float32(name):
        return optax.MultiSteps(tx, options.microbatches).gradient_transformation()
    rounding = (is_lpmm(name) and options.rounding) or "stochastic"
    sums = lowbit_optax.block_quantized(
        8, code="linear", block_size=2048, rounding=rounding
    )
    # Learning rates apply to means of gradients, as in optax.MultiSteps.
    of_mean = optax.chain(optax.scale(1 / options.microbatches), tx)
    return lowbit_optax.accumulate_gradients(
        of_mean, options.microbatches, sums, seed=options.seed
    )


def weight_storage(name: str, dtype: str | None, bits: int) -> Callable[[Any], Any]:
    """Returns the function that converts float32 parameters for an optimizer."""
    if is_lpmm(name):
        return functools.partial(lowbit_optax.lpmm.quantize_params, bits=bits)
    return functools.partial(cast_weights, dtype=jnp.dtype(dtype))


def family(name: str) -> str:
    """Returns `"sgd"` or `"adamw"`: the family whose defaults the optimizer uses."""
    return "sgd" if name.endswith("sgd") else "adamw"


def compared(name: str) -> list[str]:
    """Returns the optimizers that `--compare` trains, float32 first."""
    return [prefix + family(name) for prefix in COMPARED]


def is_float32(name: str) -> bool:
    """Returns whether `name` is plain optax, with float32 weights."""
    return name == family(name)


def is_lpmm(name: str) -> bool:
    """Returns whether `name` trains QuantizedTensors, which have bits but no dtype."""
    return name.startswith("lpmm_")


def options_of(name: str) -> set[str]:
    """Returns the `OPTIONS` that the optimizer `name` supports."""
    if is_float32(name):
        return {"loss_scale"}
    if is_lpmm(name):
        return {"bits", "rounding"}
    has_extra = name.startswith("extra_bits")
    return {"dtype", "loss_scale"} | ({"bits", "rounding"} if has_extra else set())


def label(name: str, dtype: str | None, options: Options) -> str:
    """Returns the label of an optimizer, such as `"Kahan bfloat16"`."""
    text = LABELS[name]
    if is_lpmm(name):
        text = f"{text} {options.bits} bits"
    elif not is_float32(name):
        text = f"{text} {dtype}"
        if name.startswith("extra_bits"):
            text += f"+{options.bits}"
    if options.rounding not in (None, default_rounding(name, options.rounding)):
        text += ", " + options.rounding.replace("_", " ")
    if options.microbatches > 1:
        text = f"{text}, N = {options.microbatches}"
    if options.loss_scale is None:
        return text
    return f"{text}, loss scale {options.loss_scale}"


def default_rounding(name: str, other: str | None = None) -> str | None:
    """Returns the default rounding of the weights, or ``other`` if there is none."""
    method = name.rpartition("_")[0]
    return {"extra_bits": "nearest", "lpmm": "stochastic"}.get(method, other)


def cosine_schedule(peak: float, steps: int) -> optax.Schedule:
    """Returns a linear warmup over the first 5% of `steps`, then a cosine to zero."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=peak, warmup_steps=steps // 20, decay_steps=steps
    )
