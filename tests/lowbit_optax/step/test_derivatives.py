"""``derivatives`` of error feedback: the share of a moment in an update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowbit_optax._jaxprs.graph import Graph, evaluate
from lowbit_optax._step.error_feedback import derivatives

pytestmark = pytest.mark.standard_promotion

G = jnp.float32([[0.5, -1.0, 2.0], [3.0, 0.25, -4.0]])
M = jnp.float32([[1.0, 2.0, -0.5], [0.125, 5.0, 1.5]])
RATE = jnp.float32(0.25)
YES, NO = jnp.bool_(True), jnp.bool_(False)


def derivative_of(function, *others):
    """The derivative of ``function(m, g, rate, *others)``, and whether it is linear."""
    arguments = M, G, RATE, *others
    graph = Graph(jax.make_jaxpr(function)(*arguments))
    (node,), is_linear = derivatives(graph.outputs, graph.inputs[0], graph)
    known = dict(zip(graph.inputs, arguments, strict=True))
    return evaluate([node], known)[0], is_linear


def factor_of(function, *others):
    """The derivative of a function that is linear in m."""
    factor, is_linear = derivative_of(function, *others)
    assert is_linear
    return factor


LINEAR = {
    "itself": lambda m, g, rate: m,
    "subtracted": lambda m, g, rate: g * 0 - rate * m,
    "subtracted from": lambda m, g, rate: rate * m - g,
    "subtracted from itself": lambda m, g, rate: g * m - rate * m,
    "negated": lambda m, g, rate: -(m * 3),
    "in two terms": lambda m, g, rate: rate * m + m * g,
    "in two terms that are itself": lambda m, g, rate: m + m,
    "divided by an array": lambda m, g, rate: (2 * m) / g,
    "divided by a scalar": lambda m, g, rate: m / rate,
    "times twice": lambda m, g, rate: rate * (g * m),
    "cast": lambda m, g, rate: (m * rate).astype(jnp.float32),
    "selected by element": lambda m, g, rate: jnp.where(g > 0, rate * m, g),
    "selected by element, second": lambda m, g, rate: jnp.where(g > 0, g, rate * m),
    "beside an array of it": lambda m, g, rate: rate * m + jnp.sqrt(jnp.abs(g)),
}


@pytest.mark.parametrize("function", LINEAR.values(), ids=LINEAR)
def test_the_factor_is_the_derivative(function):
    _, want = jax.jvp(lambda m: function(m, G, RATE), (M,), (jnp.ones_like(M),))
    got = factor_of(function)
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.parametrize("which", [YES, NO])
def test_a_condition_selects_among_factors(which):
    def function(m, g, rate, which):
        return jax.lax.cond(which, lambda: -rate * m, lambda: g)

    assert float(factor_of(function, which)) == (-0.25 if which else 0.0)


def test_a_norm_of_the_input_counts_as_a_constant():
    def function(m, g, rate):
        del g, rate
        return m / jnp.sum(m)

    np.testing.assert_array_equal(factor_of(function), 1 / jnp.sum(M))


def test_a_result_that_does_not_depend_on_the_input_has_the_derivative_0():
    assert factor_of(lambda m, g, rate: g * rate) == 0


NOT_LINEAR = {
    "square": lambda m, g, rate: m * m,
    "root": lambda m, g, rate: jnp.sqrt(m) * g,
    "divisor": lambda m, g, rate: g / m,
    "sign": lambda m, g, rate: jnp.sign(m),
    "sign beside a linear term": lambda m, g, rate: rate * m + g * jnp.sign(m),
    "rounded beside a linear term": lambda m, g, rate: rate * m + jnp.round(m),
    "which is selected": lambda m, g, rate: jnp.where(m > 0, g, rate * m),
    "another place": lambda m, g, rate: m[::-1],
    "narrow": lambda m, g, rate: m.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("function", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_other_results_are_not_linear(function):
    assert not derivative_of(function)[1]


def test_other_places_count_as_constants():
    factor, _ = derivative_of(lambda m, g, rate: rate * m + g * m[::-1])
    assert factor == RATE


def test_scalars_stay_scalars():
    assert factor_of(lambda m, g, rate: m * 3 - rate * m).shape == ()
