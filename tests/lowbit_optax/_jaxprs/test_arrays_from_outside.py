"""Finds the arrays that a kernel reads in addition to the leaf's own arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.elementwise import (
    NotElementwise,
    ScalarTable,
    arrays_from_outside,
    program_of,
)
from lowbit_optax._jaxprs.graph import Graph, evaluate
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion

X = jnp.arange(1.0, 13).reshape(3, 4)
TURN = jnp.eye(3)[::-1]


def updated(function, *others):
    """Returns the shapes that ``function``'s program reads, and the program's value."""
    arguments = X, *others
    graph = Graph(jax.make_jaxpr(function)(*arguments))
    own, scalars = graph.inputs[:1], ScalarTable(graph)
    outside = arrays_from_outside(graph.outputs, own)
    program = program_of(graph.outputs, [*own, *outside], scalars)
    known = dict(zip(graph.inputs, arguments, strict=True))
    values = evaluate([*own, *outside], known)
    table = elementwise.encode_scalars(evaluate(scalars.nodes, known) or [0])
    rows = [jnp.broadcast_to(value, X.shape) for value in values]
    results = program.run(rows, table)
    return [x.aval.shape for x in outside], results


READ = {
    "nothing": (lambda x: 2 * x + x, []),
    "a scalar": (lambda x: x * jnp.sum(x), []),
    "one of three": (
        lambda x: jax.lax.select_n(
            jnp.clip(x - 5, 0, 2).astype(jnp.int32), x, -x, 3 * x
        ),
        [],
    ),
    "a scalar in every element": (
        lambda x: jnp.sqrt(x * jnp.sum(x) * jnp.max(x)) + jnp.full_like(x, jnp.min(x)),
        [],
    ),
    "a row": (lambda x: x * jnp.max(x, 0, keepdims=True), [(1, 4)]),
    "a column": (lambda x: x + jnp.max(x, 1, keepdims=True), [(3, 1)]),
    "one element": (lambda x: x * jnp.max(x, keepdims=True), [(1, 1)]),
    "a row that is repeated": (
        lambda x: x - jnp.broadcast_to(jnp.max(x, 0, keepdims=True), x.shape),
        [(1, 4)],
    ),
    "a row once": (
        lambda x: (lambda row: x * row + row)(jnp.max(x, 0, keepdims=True)),
        [(1, 4)],
    ),
    "a product of matrices": (lambda x: x + TURN @ x, [(3, 4)]),
    "a transpose": (lambda x: x + (x.T @ TURN).T, [(3, 4)]),
    "a loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: TURN @ y + y, x) * 2,
        [(3, 4)],
    ),
}


@pytest.mark.parametrize(("function", "shapes"), READ.values(), ids=READ)
def test_a_program_reads_what_it_cannot_compute(function, shapes):
    got, results = updated(function)
    assert got == shapes
    assert_same_bits(results, [function(X)])


def test_another_array_is_read_as_it_is():
    got, results = updated(lambda x, y: x * y, X + 1)
    assert got == [(3, 4)]
    assert_same_bits(results, [X * (X + 1)])


REFUSED = {
    "random numbers": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    "truth values": lambda x: jnp.where((x.T > 2).T, x, -x),
    "sorted": lambda x: x + jnp.cumsum(x, 0),
    "a vector": lambda x: x * jnp.broadcast_to(jnp.max(x, 0), x.shape),
    "a part": lambda x: x + jnp.pad(x[:2], ((0, 1), (0, 0))),
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_what_xla_fuses_with_the_update_is_not_read(function):
    with pytest.raises(NotElementwise, match="is not among the elementwise"):
        updated(function)


def test_numbers_of_64_bits_are_not_read():
    with jax.enable_x64(True), pytest.raises(NotElementwise):
        updated(lambda x, y: x * y.astype(jnp.float32), np.ones(X.shape))
