"""Compile training steps of stacked layers for TPUs, with the state in host memory."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from lowbit_optax import release
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD
from tools.gpu_program.release_steps import Model, plain
from tools.hlo import memory, text
from tools.tpu_program.targets import tpu_mesh

Space = jax.memory.Space


def is_stack(x) -> bool:
    """Return whether an array of a state is a stack of layers, rather than a blank."""
    return x.ndim == 3 and x.dtype not in (NOT_HELD, NO_RESIDUAL)


def moved_whole(loss_fn: Callable, tx) -> Callable:
    """Return a step that moves the whole state from the host, and back after the step.

    The step does not use gradient release.
    """
    step = plain(loss_fn, tx)

    def train_step(params, opt_state, batch):
        on_device = jax.device_put(opt_state, Space.Device)
        loss, params, opt_state = step(params, on_device, batch)
        back = lambda x: jax.device_put(x, Space.Host) if is_stack(x) else x
        return loss, params, jax.tree.map(back, opt_state)

    return train_step


streamed = functools.partial(release.value_and_update, state_memory="pinned_host")
"""A step with gradient release, and with the state in host memory."""


@dataclasses.dataclass(frozen=True)
class HostStep:
    """A compiled step, and the memory that it needs on the device and on the host."""

    program: jax.stages.Compiled

    @property
    def arguments(self) -> int:
        """The number of bytes of parameters, state and batch on the device."""
        return memory(self.program).argument_size_in_bytes

    @property
    def temporary(self) -> int:
        """The number of bytes of temporary memory on the device."""
        return memory(self.program).temp_size_in_bytes

    @property
    def host(self) -> int:
        """The number of bytes of arguments and temporary memory on the host."""
        found = memory(self.program)
        return found.host_argument_size_in_bytes + found.host_temp_size_in_bytes

    @property
    def is_in_place(self) -> bool:
        """Whether the step updates all of the state on the host in place."""
        found = memory(self.program)
        return found.host_alias_size_in_bytes == found.host_argument_size_in_bytes

    @functools.cached_property
    def copied_slices(self) -> int:
        """The number of asynchronous copies of slices to and from host memory."""
        lines = text(self.program).splitlines()
        starts = ("dynamic-slice-start(", "dynamic-update-slice-start(")
        return sum("S(5)" in x and any(s in x for s in starts) for x in lines)


def compile_step(make_step: Callable, model: Model, tx) -> HostStep:
    """Compile a step for one v5e, with donated parameters and state.

    Args:
      make_step: :func:`moved_whole` or :func:`streamed`, which keep the stacks of the
        state in host memory, or a function whose step keeps the state on the device.
      model: the model to train.
      tx: the optimizer.
    """
    on_device = jax.NamedSharding(tpu_mesh("v5e:2x2"), jax.P())
    on_host = on_device.with_memory_kind("pinned_host")
    has_host = make_step in (moved_whole, streamed)

    def place(x, may_move=False):
        where = on_host if may_move and has_host and is_stack(x) else on_device
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    state = jax.eval_shape(tx.init, model.params)
    state = jax.tree.map(functools.partial(place, may_move=True), state)
    params, batch = jax.tree.map(place, (model.params, model.batch))
    step = jax.jit(make_step(model.loss_fn, tx), donate_argnums=(0, 1))
    return HostStep(step.lower(params, state, batch).compile())
