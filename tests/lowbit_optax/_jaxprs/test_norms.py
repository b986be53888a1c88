"""``sums_of_squares_of`` finds norms of whole leaves, and nothing else."""

import jax
import jax.numpy as jnp
import optax
import pytest

from lowbit_optax._jaxprs.graph import Graph, evaluate
from lowbit_optax._jaxprs.norms import sums_of_squares_of

pytestmark = pytest.mark.standard_promotion

A = jnp.arange(1.0, 13).reshape(3, 4)
B = jnp.arange(2.0, 8)


def found_in(function, *arguments, among=None):
    """The values of the sums that are found, and which arguments they are of."""
    graph = Graph(jax.make_jaxpr(function)(*arguments))
    arrays = graph.inputs if among is None else graph.inputs[:among]
    found = sums_of_squares_of(arrays, graph.outputs)
    known = dict(zip(graph.inputs, arguments, strict=True))
    values = evaluate(list(found), known)
    numbers = [graph.inputs.index(array) for array in found.values()]
    return dict(zip(numbers, map(float, values), strict=True))


SQUARES = {
    "square": jnp.square,
    "power": lambda x: x**2,
    "product": lambda x: x * x,
    "beside a zero": lambda x: x * x + 0 * jnp.ones_like(x) * 0,
    "of optax": lambda x: optax.tree.norm(x, squared=True),
}


@pytest.mark.parametrize("square", SQUARES.values(), ids=SQUARES)
def test_sums_of_squares_of_whole_arrays_are_found(square):
    def update(a, b):
        return a / jnp.sqrt(jnp.sum(square(a)) + jnp.sum(square(b)))

    if square is SQUARES["beside a zero"]:
        square = lambda x: jax.lax.add(x * x, jnp.zeros(x.shape))
    assert found_in(update, A, B) == {0: float(jnp.sum(A**2)), 1: float(jnp.sum(B**2))}


OTHERS = {
    "rows": lambda a, b: a / jnp.sqrt(jnp.sum(a * a, axis=1, keepdims=True)),
    "columns": lambda a, b: jnp.sum(a**2, axis=0),
    "two arrays": lambda a, b: jnp.sum(a * a[::-1]),
    "cubes": lambda a, b: jnp.sum(a**3),
    "the array": lambda a, b: jnp.sum(a),
    "a part": lambda a, b: jnp.sum(b[:3] ** 2),
    "sums with others": lambda a, b: jnp.sum(a * a + a),
    "the largest": lambda a, b: jnp.max(a * a),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_other_results_are_left_alone(function):
    assert found_in(function, A, B) == {}


def test_only_the_given_arrays_and_what_is_wanted_count():
    def update(a, b):
        return jnp.sum(a * a), jnp.sum(b * b)

    assert list(found_in(update, A, B, among=1)) == [0]
    assert found_in(lambda a, b: a + jnp.sum(b * b) * 0 + b[0], A, B, among=1) == {}
