"""Compile optimizer steps for H200s, and read bytes, memory and kernels.

Parameters and gradients are bfloat16 by default. Parameters and state are donated.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from tools.gpu_program.dump import compile_with_dump
from tools.gpu_program.machine_code import Kernel, program
from tools.gpu_program.targets import gpu_mesh, lower_for
from tools.hlo import kernels, memory, text

BF16, F32 = jnp.bfloat16, jnp.float32


def fast(tx):
    """Return a step that calls ``lowbit_optax.step``."""
    return lambda params, state, grads: lowbit_optax.step(tx, params, state, grads)


def applied(tx, apply=lowbit_optax.apply_updates):
    """Return a step that calls ``update`` and then ``apply``, as with optax."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    return step


def with_master(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep float32 masters in the state, so that ``update`` returns copies of them."""

    def init(params):
        master = jax.tree.map(lambda x: x.astype(F32), params)
        return master, inner.init(master)

    def update(grads, state, params):
        master, inner_state = state
        grads = jax.tree.map(lambda g: g.astype(F32), grads)
        updates, inner_state = inner.update(grads, inner_state, master)
        master = optax.apply_updates(master, updates)
        copies = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
        return copies, (master, inner_state)

    return optax.GradientTransformation(init, update)


def replaced(tx):
    """Return a step for transformations whose updates are the new parameters.

    An example is :func:`with_master`.
    """

    def step(params, state, grads):
        return tx.update(grads, state, params)

    return step


@dataclasses.dataclass(frozen=True)
class OptimizerStep:
    """A lowered step, which is compiled on first use.

    Args:
      lowered: the step.
      parameters: the number of parameters.
      stored: the number of bytes of the parameters and the state.
    """

    lowered: jax.stages.Lowered
    parameters: int
    stored: int

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program."""
        # Mosaic compiles a kernel only once per process, so its PTX is dumped now.
        return compile_with_dump(self.lowered).compiled

    @functools.cached_property
    def machine_code(self) -> dict[str, Kernel]:
        """The kernels of the program by name."""
        return program(self.lowered).kernels

    @property
    def fused(self) -> Kernel:
        """The fused kernel of a step that has only one leaf."""
        (kernel,) = (k for n, k in self.machine_code.items() if n == "fused_update")
        return kernel

    @property
    def launches(self) -> list[tuple[str, int]]:
        """The names of the kernels, and the bytes that each reads and writes."""
        return kernels(self.compiled)

    @property
    def fused_launches(self) -> int:
        """The number of launches of Pallas kernels."""
        launches = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
        return sum(text(self.compiled).count(launch) for launch in launches)

    @property
    def large(self) -> int:
        """The number of kernels that move more than a byte per parameter."""
        return sum(size > self.parameters for _, size in self.launches)

    @property
    def moved(self) -> float:
        """The number of bytes that the kernels read and write, per parameter."""
        return sum(size for _, size in self.launches) / self.parameters

    @property
    def temporary(self) -> float:
        """The number of bytes of temporary memory per parameter."""
        return memory(self.compiled).temp_size_in_bytes / self.parameters

    @property
    def in_place(self) -> bool:
        """Whether the step updates all parameters and all of the state in place."""
        return memory(self.compiled).alias_size_in_bytes == self.stored


def lower_step(
    tx, params, make_step=fast, mesh=None, spec=None, grads=None
) -> OptimizerStep:
    """Lower a step that donates parameters and state.

    Args:
      tx: a transformation.
      params: a tree of ShapeDtypeStructs, or of QuantizedTensors that contain them.
      grads: a tree of ShapeDtypeStructs; if None, ``params``, which must not contain
        QuantizedTensors then.
      make_step: :func:`fast` or :func:`applied`.
      mesh: the devices; if None, one H200.
      spec: see ``targets.trace_for``.
    """
    state = jax.eval_shape(tx.init, params)
    mesh = gpu_mesh() if mesh is None else mesh
    grads = params if grads is None else grads
    arguments = params, state, grads
    lowered = lower_for(mesh, make_step(tx), *arguments, spec=spec, donate=(0, 1))
    return OptimizerStep(
        lowered, sum(x.size for x in jax.tree.leaves(grads)), bytes_of(state, params)
    )


def lower_lpmm_step(tx, like, bits=12, block_size=2048, **options) -> OptimizerStep:
    """Lower a step on quantized weights.

    Args:
      tx: a transformation.
      like: a tree of ShapeDtypeStructs, which are the gradients.
      bits: the number of bits of a weight.
      block_size: the number of weights that share a scale.
      **options: options of :func:`lower_step`.
    """
    params = quantized_like(like, bits, block_size)
    return lower_step(tx, params, grads=like, **options)


def quantized_like(like, bits=12, block_size=2048):
    """Return QuantizedTensors with the shapes of a tree of ShapeDtypeStructs."""
    options = {"bits": bits, "block_size": block_size}
    return jax.eval_shape(
        lambda x: lowbit_optax.lpmm.quantize_params(x, **options), like
    )


def bytes_of(*trees) -> int:
    """Return the number of bytes of all arrays in the trees."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def leaf(*shape, dtype=BF16) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a leaf."""
    return jax.ShapeDtypeStruct(shape, dtype)


def gpt2():
    """Return the 148 leaves of GPT-2, with 124M parameters."""

    def linear(rows, columns):
        return {"weight": leaf(rows, columns), "bias": leaf(columns)}

    norm = {"scale": leaf(768), "bias": leaf(768)}
    block = {
        "norm_1": norm,
        "qkv": linear(768, 2304),
        "proj": linear(768, 768),
        "norm_2": norm,
        "fc": linear(768, 3072),
        "out": linear(3072, 768),
    }
    return {
        "wte": leaf(50257, 768),
        "wpe": leaf(1024, 768),
        "blocks": [block] * 12,
        "norm": norm,
    }


def bytes_of_accesses(kernel: Kernel, bits: int, store: bool | None = None) -> float:
    """Return the bytes that a kernel's threads move in accesses of the given width.

    Args:
      kernel: the kernel.
      bits: the width of the accesses.
      store: True counts only stores, and False only loads; None counts both.
    """
    threads = sum(launch.threads for launch in kernel.launches)
    found = (a for a in kernel.accesses if a.bits == bits and store in (None, a.store))
    return sum(a.executed for a in found) * bits / 8 * threads
