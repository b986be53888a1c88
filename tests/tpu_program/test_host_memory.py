"""The state of scanned layers in host memory, in steps compiled for a TPU."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax import release
from lowbit_optax.states import host_step

pytest.importorskip("libtpu", reason="needs the tpu-program extra")

from tools.gpu_program.release_steps import matrices
from tools.gpu_program.steps import bytes_of
from tools.hlo import text
from tools.hlo_nodes import entry_of, read_computations
from tools.tpu_program.release_steps import HostStep, compile_step, is_stack, streamed
from tools.tpu_program.targets import tpu_mesh

LAYERS, WIDTH = 6, 2048
STEPS = {
    "float32": lowbit_optax.lowbit(
        optax.adamw(1e-3), weights=lowbit_optax.nearest(), moments="float32"
    ),
    "extra_bits": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "lowbit": lowbit_optax.lowbit_adamw(1e-3, implementation="pallas"),
}


def compiled(make_step, name) -> HostStep:
    return compile_step(make_step, matrices(LAYERS, WIDTH, 256), STEPS[name])


def bytes_of_state(name) -> int:
    params = matrices(LAYERS, WIDTH, 256).params
    state = jax.eval_shape(STEPS[name].init, params)
    return sum(bytes_of(x) for x in jax.tree.leaves(state) if is_stack(x))


@pytest.mark.parametrize("name", STEPS)
def test_the_device_holds_two_or_three_layers_of_the_state_copied_by_themselves(name):
    makers = streamed, release.value_and_update
    on_host, on_device = (compiled(make_step, name) for make_step in makers)
    state = bytes_of_state(name)
    # The compiler's figures include padded rows of scales.
    assert state <= on_host.host <= 1.05 * state
    assert on_host.arguments <= on_device.arguments - state
    # XLA also keeps a part of the decoded arrays.
    layers = 3 if name == "lowbit" else 2
    assert on_host.temporary <= on_device.temporary + layers * state / LAYERS + 2**19
    stacks = {"float32": 2, "extra_bits": 3, "lowbit": 5}[name]
    assert on_host.copied_slices == 2 * stacks
    assert on_host.is_in_place


@pytest.mark.parametrize("leaves", [4, 12])
def test_without_release_the_device_holds_two_groups_of_the_state(leaves, monkeypatch):
    tx, width = optax.adamw(1e-3), 2048
    monkeypatch.setattr(host_step, "GROUP_BYTES", 1)
    where = jax.NamedSharding(tpu_mesh("v5e:2x2"), jax.P())
    shape = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=where)
    params = {f"w{n}": shape for n in range(leaves)}
    shardings = lowbit_optax.host_shardings(tx, params, where)
    like = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    state = jax.tree.map(like, jax.eval_shape(tx.init, params), shardings)
    step = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
    compiled = HostStep(step.lower(params, state, params).compile())
    of_a_leaf = 2 * bytes_of(shape)
    assert compiled.host == leaves * of_a_leaf
    assert compiled.is_in_place
    # A few arrays are also in the TPU's fast memory.
    assert compiled.temporary <= 2.5 * of_a_leaf
    loops = copies_in_loops(compiled)
    assert loops == [["copy-start"] * 4 + ["copy-done"] * 4] * (leaves - 1)


def copies_in_loops(step: HostStep) -> list[list[str]]:
    """The copies from and to the host in each loop that copies in both directions."""
    computations = read_computations(text(step.program))
    entry = entry_of(text(step.program))
    found = []
    for name, nodes in computations.items():
        copies = [x for x in nodes if x.op in ("copy-start", "copy-done")]
        moved = [x.op for x in copies if "S(5)" in x.shape or x.op == "copy-done"]
        if name != entry and len(moved) > 4:
            found.append(moved)
    return found
