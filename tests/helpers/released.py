"""The step with gradient release and the ordinary step, side by side.

Both compute the same operations in the same order. They are compiled one operation at a
time, so that equal operations have equal machine code. If XLA fused them, results could
differ: it contracts a product and a sum in one loop and not in another, and turns a
division by a scalar into a product in only one program, depending on the processor.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax import release
from tests.helpers.optimizers import assert_same_bits, initial

RATE = 2.0**-7
OPERATION_BY_OPERATION = {
    "xla_backend_optimization_level": 0,
    "xla_disable_hlo_passes": "fusion,algsimp",
}
SGD = optax.sgd(RATE, momentum=0.5)
WIDTH = 64
"""Layers of 64 x 64 are the smallest that the loop updates."""


def ordinary(loss_fn, tx, has_aux=False):
    """The step as users of optax write it."""

    def step(params, state, *args):
        differentiate = jax.value_and_grad(loss_fn, has_aux=has_aux)
        value, grads = differentiate(params, *args)
        updates, state = tx.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def run(step, tx, params, batches, state=None):
    """The losses, the parameters and the state after jitted steps."""
    step = jax.jit(step, compiler_options=OPERATION_BY_OPERATION)
    state = initial(tx, params) if state is None else state
    values = []
    for batch in batches:
        value, params, state = step(params, state, *batch)
        values.append(value)
    return values, params, state


def assert_equal_steps(loss_fn, tx, params, batches, *, in_loop=None, has_aux=False):
    """Assert that losses, parameters and state have the bits of the ordinary step.

    Args:
      in_loop: the paths that the loop must have updated; None skips this check.
    """
    if in_loop is not None:
        found = updated_in_loop(loss_fn, tx, params, *batches[0], has_aux=has_aux)
        assert found == set(in_loop)
    want = run(ordinary(loss_fn, tx, has_aux), tx, params, batches)
    released = release.value_and_update(loss_fn, tx, has_aux=has_aux)
    got = run(released, tx, params, batches)
    losses = [value[0] if has_aux else value for value in want[0]]
    assert np.isfinite(losses).all()
    assert_same_bits(got, want)
    return got


def explained(loss_fn, tx, params, *batch, **options):
    """The report of ``explain``, which only needs shapes."""
    state = jax.eval_shape(tx.init, params)
    return release.explain(loss_fn, tx, **options)(params, state, *batch)


def updated_in_loop(loss_fn, tx, params, *batch, **options):
    """Paths of the leaves that the loop updates."""
    reasons = explained(loss_fn, tx, params, *batch, **options)
    return {name for name, reason in reasons.items() if reason == "in the loop"}


class Models(dict):
    """Losses by name, for comparisons of released steps with ordinary steps.

    Calling it returns a decorator that adds a loss.
    """

    def __call__(self, *in_loop, name=None, params=None, has_aux=False, waits=""):
        """Add a loss.

        Args:
          name: the loss's name; the function's name if None.
          in_loop: the paths that the loop must update.
          params: a function that makes the parameters; :func:`simple_params` if None.
          has_aux: whether the loss returns an auxiliary value.
          waits: text that must be in the reason why layers wait.
        """

        def register(loss_fn):
            make = params or simple_params
            self[name or loss_fn.__name__] = loss_fn, make, in_loop, has_aux, waits
            return loss_fn

        return register

    def check(self, name):
        """Assert that released steps are exact, and where leaves are updated."""
        loss_fn, make, in_loop, has_aux, waits = self[name]
        params, inputs = make(), batches(3)
        if waits:
            reports = explained(loss_fn, SGD, params, *inputs[0], has_aux=has_aux)
            assert reports["['layers']"].endswith(f": {waits}")
        assert_equal_steps(
            loss_fn, SGD, params, inputs, in_loop=in_loop, has_aux=has_aux
        )


@functools.cache
def _numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def normal(*shape, dtype=jnp.float32, seed=0, scale=1.0):
    """Normal numbers."""
    return jnp.asarray(scale * _numbers(*shape, seed=seed), jnp.float32).astype(dtype)


def weights(*depth, dtype=jnp.float32, seed=0):
    """Stacked square matrices that keep the scale of their inputs."""
    return normal(*depth, WIDTH, WIDTH, dtype=dtype, seed=seed, scale=WIDTH**-0.5)


def batches(count, rows=4):
    """A list of inputs."""
    return [(normal(rows, WIDTH, seed=100 + n),) for n in range(count)]


def dense(x, w):
    """A layer, in float32."""
    return jnp.tanh(x @ w.astype(jnp.float32))


def simple_body(x, w):
    """The body of a scan over layers."""
    return dense(x, w), None


def simple_params(layers=3, dtype=jnp.float32):
    """One stack, and a leaf that no scan reads."""
    return {"layers": weights(layers, dtype=dtype), "head": normal(WIDTH, dtype=dtype)}


def simple_loss(params, x, body=simple_body, xs=None, **options):
    """A scan, and a function that reduces its result to a scalar."""
    xs = params["layers"] if xs is None else xs
    x, _ = jax.lax.scan(body, x, xs, **options)
    return head_loss(params, x)


def head_loss(params, x):
    """A scalar loss."""
    return jnp.mean((x @ params["head"].astype(jnp.float32)) ** 2)


SIMPLE_IN_LOOP = {"['layers']"}


def mixed_params(layers=3):
    """Stacks in three dtypes, one of small layers, and a leaf that no scan reads."""
    return {
        "layers": {
            "wide": weights(layers, seed=2),
            "brain": weights(layers, dtype=jnp.bfloat16, seed=3),
            "half": weights(layers, dtype=jnp.float16, seed=4),
            "bias": normal(layers, WIDTH, seed=5, scale=0.125),
        },
        "head": normal(WIDTH, dtype=jnp.bfloat16, seed=6),
    }


MIXED_IN_LOOP = {f"['layers']['{name}']" for name in ("wide", "brain", "half")}


def mixed_loss(params, x):
    """A loss with the parameters of :func:`mixed_params`."""

    def body(x, layer):
        x = dense(x, layer["wide"]) + layer["bias"]
        return dense(dense(x, layer["brain"]), layer["half"]), None

    return simple_loss(params, x, body)
