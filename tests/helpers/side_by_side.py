"""The same training with optax's AdamW in float32 and with this package's optimizers.

Each trainer's result is a row of ``docs/trainers.md``. If ``TRAINERS_ROWS`` is in
the environment, :func:`compare` writes the row to that folder.
"""

import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from tests.helpers.optimizers import matching_grad_dtype

STEPS = 40
WIDTH, HIDDEN = 64, 128
LEARNING_RATE = 3e-3
NEAR = 0.01  # relative to the loss in float32

OURS = {
    "lowbit_adamw": lowbit_optax.lowbit_adamw,
    "kahan_adamw": lowbit_optax.kahan_adamw,
    "extra_bits_adamw": lowbit_optax.extra_bits_adamw,
}


def batches(steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and a teacher's targets for each step; the last step is held out.

    The teacher is a fixed network, so that there is something to learn.
    """
    random = np.random.default_rng(0)
    inputs = random.standard_normal((steps + 1, 64, WIDTH)).astype(np.float32)
    first = random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return inputs, np.tanh(inputs @ first).astype(np.float32)


def kernels(seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights of a network with one hidden layer, without biases."""
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.standard_normal(shape) / np.sqrt(shape[0])
    return {
        "first": draw(WIDTH, HIDDEN).astype(np.float32),
        "second": draw(HIDDEN, WIDTH).astype(np.float32),
    }


def network(weights, inputs):
    """The outputs of this network, computed in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    return jnp.tanh(inputs @ wide["first"]) @ wide["second"]


def squared_error(outputs, targets):
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets))


def narrow(tree: Any, dtype: Any = jnp.bfloat16) -> Any:
    """The tree with floating-point leaves in ``dtype``."""
    is_float = lambda x: jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_float(x) else x, tree)


def bytes_per_parameter(params: Any, state: Any) -> float:
    """Bytes of the parameters and the optimizer's state, per parameter."""
    arrays = lambda tree: [x for x in jax.tree.leaves(tree) if hasattr(x, "nbytes")]
    size = sum(x.size for x in arrays(params))
    return sum(x.nbytes for x in arrays((params, state))) / size


def with_narrow_updates(run):
    """``run`` with bfloat16 updates of bfloat16 parameters, for sums without a cast."""

    def wrapped(tx: optax.GradientTransformation, dtype: Any):
        is_narrow = dtype == jnp.bfloat16
        return run(matching_grad_dtype(tx) if is_narrow else tx, dtype)

    return wrapped


def compare(
    trainer: str,
    package: str,
    run: Callable[[optax.GradientTransformation, Any], tuple[Any, Any, Any]],
    dtype: Any = jnp.bfloat16,
    does_not_work: Sequence[str] = (),
    near: float = NEAR,
) -> None:
    """Assert that all optimizers train like optax in float32, and note the row.

    Args:
      trainer: the name of the row.
      package: the package whose version is in the row.
      run: a function of an optimizer and the parameters' dtype that returns the final
        loss, the parameters and the state.
      dtype: dtype of the parameters with this package's optimizers.
      does_not_work: features that this trainer's tests show to fail.
      near: the allowed relative difference to the loss in float32.
    """
    loss, params, state = run(optax.adamw(LEARNING_RATE), jnp.float32)
    usual = {"loss": float(loss), "bytes": bytes_per_parameter(params, state)}
    found, errors = {}, []
    for name, make in OURS.items():
        try:
            loss, params, state = run(make(LEARNING_RATE), dtype)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            found[name] = {"error": f"{type(error).__name__}: {first_line}"}
            errors.append(error)
            continue
        size = bytes_per_parameter(params, state)
        found[name] = {"loss": float(loss), "bytes": size}
    note(
        trainer,
        version=importlib.metadata.version(package),
        package=package,
        float32=usual,
        ours=found,
        does_not_work=list(does_not_work),
    )
    if errors:
        raise ExceptionGroup(trainer, errors)
    for name, each in found.items():
        assert abs(each["loss"] / usual["loss"] - 1) < near, (name, each, usual)
        # With 16 extra bits, there are as many bytes as in float32.
        assert each["bytes"] < 1.01 * usual["bytes"], (name, each, usual)


def note(trainer: str, **figures: Any) -> None:
    """Write a trainer's figures, if a record is being made."""
    folder = os.environ.get("TRAINERS_ROWS")
    if folder:
        # Tests run in several processes, so each note is a file.
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, suffix=".json", delete=False
        ) as file:
            json.dump({"trainer": trainer, **figures}, file)


def note_restored(trainer: str, name: str, where: str) -> None:
    """Note that a restored run with this optimizer continued correctly."""
    note(trainer, restored={f"{where}: {name}": True})
