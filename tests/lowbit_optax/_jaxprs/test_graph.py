"""Graphs merge equal scalars and recognize zeros and repeated scalars."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import without_zero
from lowbit_optax._jaxprs.graph import (
    Graph,
    calls_between,
    evaluate,
    is_zero,
    scalar_of,
)

pytestmark = pytest.mark.standard_promotion

X = jnp.arange(1.0, 5)
S = jnp.float32(3)


def graph_of(function, *arguments):
    return Graph(jax.make_jaxpr(function)(*arguments))


SAME = {
    "the same operation": (lambda s: (jnp.exp(s), jnp.exp(s)), True),
    "of equal constants": (lambda s: (s * 2, s * 2), True),
    "of different constants": (lambda s: (s * 2, s * 3), False),
    "of different dtypes": (
        lambda s: [jax.lax.select(s > 0, f(1), f(2)) for f in (np.int32, np.uint32)],
        False,
    ),
    "with other parameters": (lambda s: (s**3, s**4), False),
    "in another order": (lambda s: (s - 1, 1 - s), False),
    "another operation": (lambda s: (jnp.exp(s), jnp.sin(s)), False),
}


@pytest.mark.parametrize(("function", "is_same"), SAME.values(), ids=SAME)
def test_scalars_that_are_computed_alike_are_one_node(function, is_same):
    first, second = graph_of(function, S).outputs
    assert (first is second) == is_same


def test_arrays_that_are_computed_alike_are_two_nodes():
    first, second = graph_of(lambda x: (jnp.exp(x), jnp.exp(x)), X).outputs
    assert first is not second


@pytest.mark.parametrize("which", [True, False])
def test_a_conditional_selects_all_its_results(which):
    def function(which, x, s):
        return jax.lax.cond(which, lambda: (x, s + 1), lambda: (-x, s - 1))

    arguments = jnp.bool_(which), X, S
    graph = graph_of(function, *arguments)
    assert all(x.call.primitive is p.select_n_p for x in graph.outputs)
    known = dict(zip(graph.inputs, arguments, strict=True))
    for got, want in zip(
        evaluate(graph.outputs, known), function(*arguments), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("which", [-2, 0, 1, 5])
def test_a_number_selects_the_first_of_two_cases_up_to_0(which):
    graph = graph_of(lambda which, s: (which, s), jnp.int32(0), S)
    number, s = graph.outputs
    node = graph.selected(number, [s, graph.apply(jax.lax.neg, s)])
    value = evaluate(
        [node], dict(zip(graph.inputs, (jnp.int32(which), S), strict=True))
    )
    assert float(value[0]) == (3.0 if which <= 0 else -3.0)


def test_expensive_conditionals_become_selections_if_all_are_to():
    def function(which, x):
        return jax.lax.cond(which, lambda: jnp.sort(x), lambda: x)

    closed = jax.make_jaxpr(function)(jnp.bool_(True), X)
    assert Graph(closed).outputs[0].call.primitive is p.cond_p
    assert Graph(closed, selects=True).outputs[0].call.primitive is p.select_n_p


def test_a_named_function_may_stay_one_call():
    @jax.jit
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    closed = jax.make_jaxpr(lambda x: norm(x) + 1)(X)
    primitives = lambda graph: [
        x.primitive for x in calls_between(graph.outputs, graph.inputs)
    ]
    assert p.jit_p not in primitives(Graph(closed))
    assert primitives(Graph(closed, opaque={"norm"})) == [p.jit_p, p.add_p]


ZEROS = {
    "a number": (lambda x: jnp.float32(0), True),
    "an array": (lambda x: jnp.zeros(4), True),
    "its square": (lambda x: jnp.square(jnp.zeros(4)), True),
    "negative": (lambda x: jnp.full(4, -0.0), True),
    "named": (
        lambda x: checkpoint_name(jax.lax.stop_gradient(jnp.zeros(4)), "x"),
        True,
    ),
    "one": (lambda x: jnp.ones(4), False),
    "an input": (lambda x: x, False),
    "a product with it": (lambda x: x * 0, False),  # NaN where x is infinite
    "a sum": (lambda x: jnp.zeros(4) + 1, False),
}


@pytest.mark.parametrize(("function", "is_it"), ZEROS.values(), ids=ZEROS)
def test_results_that_are_always_zero_are_recognised(function, is_it):
    assert is_zero(graph_of(function, X).outputs[0]) == is_it


def test_a_sum_with_zero_is_its_other_term():
    zeros = lambda: jnp.zeros(4)
    for function in (lambda x: x + zeros(), lambda x: zeros() + x):
        graph = graph_of(function, X)
        assert without_zero(graph.outputs[0].call) is graph.inputs[0]
    for function in (lambda x: x + 1, lambda x: x - zeros(), lambda x: x * zeros()):
        assert without_zero(graph_of(function, X).outputs[0].call) is None


def test_a_repeated_scalar_is_known_as_a_scalar():
    def function(s, x):
        return s, jnp.full((2, 4), s), jnp.full(4, s) + 1, jnp.broadcast_to(x, (2, 4))

    graph = graph_of(function, S, X)
    s = graph.inputs[0]
    assert [scalar_of(x) for x in graph.outputs] == [s, s, None, None]
