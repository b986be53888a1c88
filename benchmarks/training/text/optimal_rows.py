"""Models of two sizes for ``compute_optimal``, and the rows that train them."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from benchmarks.training import format_rows
from benchmarks.training.format_rows import FEW_BITS, INTO_MU, Row
from lowbit_optax import extra_bits, lpmm, stochastic_rounding
from tools import is_installed
from tools.models.gpt import GPT

B1, B2, DECAY, CLIP = 0.9, 0.95, 0.1, 1.0
"""The options of AdamW in all rows and in PyTorch: common language-model values."""


def loss_and_grads(loss_fn: Callable, params, tokens):
    """Return the loss and its gradients, which have the dtypes of the weights.

    Gradients are bfloat16 for float8 weights, and float32 for quantized weights.
    """
    is_float8 = lambda x: (
        x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    )
    wide = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if is_float8(x) else x, params)
    return lpmm.value_and_grad(loss_fn, lazy=True)(wide, tokens)


def _clipped(inner):
    return optax.chain(optax.clip_by_global_norm(CLIP), inner)


def adamw(rate):
    return _clipped(optax.adamw(rate, B1, B2, weight_decay=DECAY))


def _factored(rate):
    return _clipped(format_rows.factored_adamw(rate, B1, B2, weight_decay=DECAY))


def _muon(rate):
    return _clipped(
        format_rows.muon(
            rate,
            weight_decay=DECAY / format_rows.MUON,
            adam_b1=B1,
            adam_b2=B2,
            adam_weight_decay=DECAY,
        )
    )


def _lpmm(rate):
    return _clipped(lowbit_optax.lpmm_adam(rate, B1, B2, weight_decay=DECAY))


def _flash(rate):
    """Return FlashOptim's AdamW without its kernels, as an optax transformation."""
    flash = importlib.import_module("flashoptim_jax")
    inner = flash.flash_adamw(
        rate, B1, B2, weight_decay=DECAY, master_weight_bits=24, fused=False
    )

    def update_fn(grads, state, params):
        new, state = inner.step(params, state, grads)
        wide = lambda x: x.astype(jnp.float32)
        return jax.tree.map(lambda a, b: wide(a) - wide(b), new, params), state

    return _clipped(optax.GradientTransformation(inner.init, update_fn))


def _in(weights=None, moments=None, inner=adamw):
    return format_rows.of(inner, weights, moments).build


_EXACT = {"sum_rounding": "stochastic"}

_float32 = format_rows.of_float32

ROWS = {
    "float32": _float32(adamw),
    # These rows show how far apart two runs end if their initial weights differ only in
    # the last bits of float32, or of bfloat16.
    "float32, start times 1 + 2^-20": _float32(adamw, factor=1 + 2.0**-20),
    "float32, start times 1 + 2^-9": _float32(adamw, factor=1 + 2.0**-9),
    "bfloat16, nearest": Row(
        _in(lowbit_optax.nearest(), lowbit_optax.cast(jnp.bfloat16))
    ),
    "lowbit": Row(_in()),
    "lowbit, exact sums": Row(_in(extra_bits(8, **_EXACT))),
    # Each half of lowbit alone.
    "float32, 8-bit moments": Row(_in(), jnp.float32, has_master=False),
    "8 extra bits, float32 moments": Row(_in(moments={})),
    "stochastic": Row(_in(stochastic_rounding())),
    "stochastic, exact sums": Row(_in(stochastic_rounding(**_EXACT))),
    "error into mu": Row(_in(INTO_MU)),
    "factored, all in float32": _float32(_factored),
    "factored": Row(_in(None, FEW_BITS, _factored)),
    "factored, no extra bits": Row(_in(INTO_MU, FEW_BITS, _factored)),
    "LPMM, 12 bits": Row(_lpmm, None),
    "float8, 8 extra bits": Row(_in(), jnp.float8_e4m3fn),
    "MXFP8, 8 extra bits": Row(_in(), "mxfp8"),
    "Muon, float32": _float32(_muon, base="Muon, float32"),
    "Muon, lowbit": Row(_in(inner=_muon), base="Muon, float32"),
    "flashoptim-jax": Row(_flash, has_master=False),
}

_CONTROLS = (
    "float32, start times 1 + 2^-9",
    "float32, 8-bit moments",
    "8 extra bits, float32 moments",
)
_MISSING = () if is_installed("flashoptim_jax") else ("flashoptim-jax",)
_MOST_ROWS = tuple(name for name in ROWS if name not in (*_CONTROLS, *_MISSING))
_FEW_ROWS = (
    *("float32", "float32, start times 1 + 2^-20", "bfloat16, nearest"),
    *("lowbit", "lowbit, exact sums", *_CONTROLS, "error into mu"),
)

GPT2 = GPT(12, 768, 12, 1024, vocabulary=50257)
"""The model whose bytes per parameter are counted."""


class Size(NamedTuple):
    """A model, its default number of steps, and its default rows."""

    model: GPT
    steps: int
    rows: tuple[str, ...] = _MOST_ROWS

    @property
    def learning_rate(self) -> float:
        """The default peak, which is smaller for wider models."""
        return 0.512 / self.model.width


SIZES = {
    "small": Size(GPT(4, 64, 4, 64), 4300),
    "large": Size(GPT(5, 128, 4, 64), 20100, _FEW_ROWS),
}
