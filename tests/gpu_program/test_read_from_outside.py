"""Kernels that read results of XLA, compiled for an H200."""

import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.steps import leaf, lower_step, replaced, with_master
from tools.gpu_program.targets import gpu_mesh
from tools.hlo import exchanged

pytestmark = pytest.mark.usefixtures("by_triton")

INNERS = {
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "sm3": optax.sm3(1e-3),
}

ONE = leaf(4096, 4096)
FEW = {
    "square": leaf(1024, 1024),
    "wide": leaf(1024, 4096),
    "uneven": leaf(1000, 1024),
    "bias": leaf(1024),
}
# Bytes of vectors along rows or columns; in a step with a master, XLA may fuse them.
VECTORS = 0.005
# A kernel writes the sums of the columns of each tile.
SUMS_OF_TILES = 0.08


# A kernel reads the gradient, 2 bytes, and reads and writes the weight, 6 bytes. The
# kernels of adafactor and sm3 also read vectors, and the sums for these vectors move 10
# bytes; sm3 has a float32 momentum. Muon's kernel reads the result of matrix products,
# and XLA chooses some of the bytes that these products move.
MOVED = {"adafactor": 10 + 8.1, "muon": 369.3, "sm3": 10 + 8 + 8}
KERNELS = {"adafactor": 2, "muon": 1, "sm3": 1}
"""Kernels per leaf: the second one computes sums over rows and columns."""


@pytest.mark.parametrize("name", INNERS)
@pytest.mark.parametrize("params", [ONE, FEW], ids=["one", "few"])
def test_no_step_moves_or_holds_more_than_with_a_float32_master(name, params):
    usual = lower_step(with_master(INNERS[name]), params, replaced)
    own = lower_step(lowbit_optax.lowbit(INNERS[name]), params)
    assert own.moved <= usual.moved
    # XLA computes the products of several leaves together, in an order that it chooses.
    is_mixed = name == "muon" and params is FEW
    assert own.temporary <= usual.temporary + (2.1 if is_mixed else SUMS_OF_TILES)
    assert own.in_place
    if params is ONE:
        assert own.fused_launches == KERNELS[name]
        assert own.moved <= MOVED[name] + 0.1


@pytest.mark.parametrize("name", ["adafactor", "sm3"])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")], ids=["rows", "columns"])
def test_eight_h200s_exchange_vectors_alone(name, spec):
    tx = lowbit_optax.lowbit(INNERS[name])
    step = lower_step(tx, ONE, mesh=gpu_mesh(8), spec=spec)
    assert step.fused_launches == KERNELS[name]
    assert sum(exchanged(step.compiled).values()) <= 2 * 4 * 4096 + 64


FACTORED = {8: 11.3, 0: 9.5}
"""Bytes moved by ``factored_adamw`` with this number of extra bits."""


@pytest.mark.parametrize("bits", FACTORED)
@pytest.mark.parametrize("shape", [(4096, 4096), (12, 1024, 3072), (1000, 3000)])
def test_factored_adamw_reads_the_gradient_twice_and_all_else_once(bits, shape):
    step = lower_step(lowbit_optax.factored_adamw(1e-3, bits=bits), leaf(*shape))
    assert step.fused_launches == 2
    # Tiles that are cut write as many sums as whole tiles.
    assert step.moved <= FACTORED[bits] + (0.1 if shape == (1000, 3000) else 0)
    assert step.temporary <= SUMS_OF_TILES + 0.03
    assert step.in_place


def test_clipping_by_the_global_norm_only_reads_the_gradient_once_more():
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        lowbit_optax.scale_by_factored_adam(),
        optax.scale(-1e-3),
    )
    four = {"mu": lowbit_optax.block_quantized(4)}
    step = lower_step(lowbit_optax.lowbit(inner, moments=four), ONE)
    assert step.moved <= FACTORED[8] + 2.01
    assert step.temporary <= SUMS_OF_TILES


@pytest.mark.parametrize("bits", FACTORED)
@pytest.mark.parametrize("spec", [P("d", None), P(None, "d")], ids=["rows", "columns"])
def test_factored_adamw_exchanges_sums_between_eight_h200s(bits, spec):
    tx = lowbit_optax.factored_adamw(1e-3, bits=bits)
    divided = lambda x: P(
        *(d if n > 1 else None for n, d in zip(x.shape, spec, strict=True))
    )
    step = lower_step(tx, ONE, mesh=gpu_mesh(8), spec=divided)
    assert step.fused_launches == 2
    # Every device contributes to the sums that its neighbours need.
    assert 4 * 4096 <= sum(exchanged(step.compiled).values()) <= 2 * 4 * 4096 + 64
    assert step.moved * 8 <= FACTORED[bits] + 0.1


def test_a_format_that_packs_nothing_is_left_to_xla():
    tx = lowbit_optax.lowbit(INNERS["adafactor"], weights=lowbit_optax.kahan())
    step = lower_step(tx, ONE)
    assert step.fused_launches == 0
    assert step.moved <= 30.1
    assert step.temporary <= 4.1
