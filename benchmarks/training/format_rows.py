"""Optimizers and formats for a GPT, each compared with a float32 optimizer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks import records
from lowbit_optax import block_quantized, extra_bits, stochastic_rounding
from tools.models.gpt import GPT

OF_BYTES = GPT(12, 768, 12, 1024)
"""GPT-2 with a vocabulary of 256 bytes, for the bytes per parameter."""

MUON = 5
"""The learning rate of Muon divided by the learning rate of AdamW."""

FEW_BITS = {"mu": block_quantized(4), "nu": block_quantized(8)}
"""The moments of ``lowbit_optax.factored_adamw``."""

INTO_MU = stochastic_rounding(error_feedback="mu")


class Row(NamedTuple):
    """An optimizer, and how it keeps its weights.

    Attributes:
      build: a function from a schedule of learning rates to the optimizer.
      dtype: the dtype of the weights; ``"mxfp8"`` for weights from ``block_scale``, and
        None for weights from ``quantize_params``.
      base: the name of the float32 row to compare with, which may be the row itself.
      has_master: whether the state keeps the low bits of the float32 weights.
      factor: a factor that multiplies the float32 weights at the start.
    """

    build: Callable[[optax.Schedule], optax.GradientTransformation]
    dtype: Any = jnp.bfloat16
    base: str = "float32"
    has_master: bool = True
    factor: float = 1.0

    def start(self, tx, master):
        """Return parameters and state, given float32 weights. Norms stay float32."""
        master = jax.tree.map(lambda x: x * self.factor, master)
        if self.dtype is None:
            params = lowbit_optax.lpmm.quantize_params(master, bits=12)
            return params, tx.init(params)
        if self.dtype == "mxfp8":
            scale = functools.partial(
                lowbit_optax.block_scaling.block_scale, axis=_summed_axis
            )
            return lowbit_optax.from_master(tx, master, jax.eval_shape(scale, master))
        if self.has_master:
            return lowbit_optax.from_master(tx, master, self.dtype, is_norm)

        def narrowed(path, x):
            return x if is_norm(jax.tree_util.keystr(path), x) else x.astype(self.dtype)

        params = jax.tree_util.tree_map_with_path(narrowed, master)
        return params, tx.init(params)

    def bytes_per_parameter(self, model: GPT) -> float:
        """Return the stored bytes per parameter of a model, from its shapes."""
        tx = self.build(optax.constant_schedule(1e-3))
        master = jax.eval_shape(model.init, jax.random.key(0))
        params, _ = jax.eval_shape(functools.partial(self.start, tx), master)
        return lowbit_optax.memory_report(tx, params).bytes_per_param


def is_norm(path: str, leaf) -> bool:
    """Return whether a leaf belongs to a normalization, which stays float32."""
    del leaf
    return "norm" in path


def _summed_axis(path: str) -> int | None:
    """Return the axis that products with this weight sum over, or None for norms."""
    if "norm" in path:
        return None
    return -1 if "embedding" in path or "positions" in path else -2


def of_float32(inner: Callable, **options) -> Row:
    """Return the row of an optimizer in float32."""
    return Row(inner, jnp.float32, has_master=False, **options)


def of(inner: Callable, weights: Any = None, moments: Any = None, **options) -> Row:
    """Return the row of an optimizer inside ``lowbit``, with these formats."""
    build = lambda rate: lowbit_optax.lowbit(
        inner(rate), weights=weights, moments=moments
    )
    return Row(build, **options)


def factored_adamw(
    rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    *,
    weight_decay: float = 1e-4,
    mask: Any = None,
    least: int = 64,
) -> optax.GradientTransformation:
    """Return AdamW with a factored second moment for ``least`` or more rows."""
    return optax.chain(
        lowbit_optax.scale_by_factored_adam(b1, b2, min_dim_size_to_factor=least),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )


def muon(rate: optax.Schedule, **options) -> optax.GradientTransformation:
    """Return Muon for the matrices of the layers, at ``MUON`` times the learning rate.

    Adam trains the embeddings and norms.
    """
    of_stack = optax.contrib.MuonDimensionNumbers(1, 2)
    return optax.contrib.muon(
        lambda step: MUON * rate(step),
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda x: of_stack if x.ndim == 3 else None, params
        ),
        **options,
    )


def adamw() -> dict[str, Row]:
    """Return the rows of AdamW."""
    plain = lowbit_optax.cast(jnp.bfloat16)
    row = functools.partial(of, optax.adamw)
    return {
        "float32": of_float32(optax.adamw),
        "bfloat16, nearest": row(lowbit_optax.nearest(), plain),
        "8 extra bits": row(extra_bits(8)),
        "stochastic": row(stochastic_rounding()),
        "error into mu": row(INTO_MU),
        "float16, 8 extra bits": row(extra_bits(8), dtype=jnp.float16),
    }


class Run(NamedTuple):
    """The losses of all steps of a run, and its figures at the end."""

    losses: Sequence[float]
    ends: dict[str, float]


def figures(found: dict[str, list[Run]], rows: dict[str, Row], points: int) -> dict:
    """Return the record of each row: its spreads, and differences from its base.

    Args:
      found: for each row, a run per seed.
      rows: the rows by name.
      points: the number of points in a curve. Each is the mean loss of several steps.
    """
    curves = {
        name: np.reshape([run.losses for run in runs], (len(runs), points, -1)).mean(2)
        for name, runs in found.items()
    }

    def ends(name: str) -> dict[int, dict[str, float]]:
        runs = zip(curves[name], found[name], strict=True)
        return dict(enumerate({"training": c[-1], **run.ends} for c, run in runs))

    return {
        name: {
            "bytes_per_parameter": rows[name].bytes_per_parameter(OF_BYTES),
            "curves": curves[name],
            **compared(ends(name), ends(rows[name].base)),
        }
        for name in found
    }


def compared(own: dict[int, dict[str, float]], base: dict[int, dict]) -> dict:
    """Return the spread of each figure of a row, and of its differences from its base.

    Args:
      own: a dictionary from seeds to the figures of the row.
      base: a dictionary from some of these seeds to the figures of the base.
    """
    both = [seed for seed in own if seed in base]
    ends = next(iter(own.values()))
    return {
        **{end: records.spread([run[end] for run in own.values()]) for end in ends},
        "gaps": {
            end: records.spread([own[seed][end] - base[seed][end] for seed in both])
            for end in ends
            if both and end in base[both[0]]
        },
    }
