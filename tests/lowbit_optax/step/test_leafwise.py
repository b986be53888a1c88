"""Programs of elementwise operations compute the inner update or raise an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowbit_optax._jaxprs import elementwise
from lowbit_optax._jaxprs.elementwise import NotElementwise, ScalarTable
from lowbit_optax._jaxprs.graph import Graph, evaluate
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion

ROW = jnp.arange(1.0, 9.0)


def program_from(function, *arrays):
    graph = Graph(jax.make_jaxpr(function)(*arrays))
    inputs = [node for node in graph.inputs if not node.is_scalar]
    scalars = ScalarTable(graph)
    return elementwise.program_of(graph.outputs, inputs, scalars), scalars, graph


def run(function, *arrays):
    """Returns the results of a function's program, with scalars from the table."""
    program, scalars, graph = program_from(function, *arrays)
    known = dict(zip(graph.inputs, arrays, strict=True))
    table = elementwise.encode_scalars(evaluate(scalars.nodes, known) or [0])
    rows = [x for x in arrays if jnp.ndim(x)]
    return jax.jit(program.run)(rows, table)


# Transformations of optax.

ELEMENTWISE = {
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 0.1, 2, 9)),
    "nadam": optax.nadam(0.01),
    "amsgrad": optax.amsgrad(0.01),
    "adan": optax.adan(0.01),
    "yogi": optax.yogi(0.01),
    "radam": optax.radam(0.01),
    "novograd": optax.novograd(0.01),
    "lamb": optax.lamb(0.01),
    "rmsprop": optax.rmsprop(0.01, momentum=0.9, centered=True),
    "adagrad": optax.adagrad(0.01),
    "schedule_free": optax.contrib.schedule_free_adamw(0.01),
    "global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
    "block_rms": optax.chain(optax.clip_by_block_rms(0.05), optax.adamw(0.01)),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0, 9)),
    "finite": optax.apply_if_finite(optax.adamw(0.01), 3),
    # The update before the fourth step is zero, and XLA drops the sign of this zero.
    "multi_steps_waiting": optax.MultiSteps(optax.sgd(0.25, momentum=0.5), 4),
}
# These have no quotients by scalars or sums of products, which may round differently.
EXACT = {
    "sgd": optax.sgd(optax.linear_schedule(0.1, 0.0, 9)),
    "sgd_nesterov": optax.sgd(0.25, momentum=0.5, nesterov=True),
    "sign_sgd": optax.sign_sgd(0.25),
    "clip": optax.chain(optax.clip(0.05), optax.sgd(0.25, momentum=0.5)),
    "lion": optax.lion(0.25, b1=0.5, b2=0.5, weight_decay=0.5),
    "multi_steps": optax.MultiSteps(optax.sgd(0.25, momentum=0.5), 3),
}


def traced(inner):
    """Returns the third update of one leaf as a function, and its arguments."""
    random = np.random.default_rng(0)
    draw = lambda scale: jnp.asarray(scale * random.standard_normal(16), jnp.float32)
    params = draw(1.0)
    state, update = inner.init(params), jax.jit(inner.update)
    for _ in range(2):
        updates, state = update(draw(0.1), state, params)
        params = optax.apply_updates(params, updates)
    arrays, structure = jax.tree.flatten((draw(0.1), state, params))

    def function(*arrays):
        results = inner.update(*jax.tree.unflatten(structure, arrays))
        return [x for x in jax.tree.leaves(results) if x.shape == params.shape]

    return function, arrays


@pytest.mark.parametrize("name", ELEMENTWISE | EXACT)
def test_a_program_computes_what_the_inner_transformation_does(name):
    function, arrays = traced((ELEMENTWISE | EXACT)[name])
    got, want = run(function, *arrays), jax.jit(function)(*arrays)
    if name in EXACT:
        assert_same_bits(got, want)
    for a, b in zip(got, want, strict=True):
        # Allow a few units: for schedule_free, units of the masters.
        size = 3.0 if name == "schedule_free" else np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1.2e-7 * size)


# Small functions.


def corrected(mean, square, weight, first, second):
    quotient = (mean / first) / (jnp.sqrt(square / second) + 0.5)
    return weight - 0.1 * (quotient + 0.01 * weight)


def of_many_calls(x):
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), tangents[0]))
    square = jax.jit(lambda x: x * x)
    return jax.checkpoint(lambda x: cube(x) + square(x))(x) + jnp.clip(x, 0.0, 1.0)


CORRECTIONS = jnp.float32(0.3), jnp.float32(0.2)
FUNCTIONS = {
    "corrections of averages": (corrected, ROW, ROW + 1, ROW - 5, *CORRECTIONS),
    "a narrow product": (lambda a, b: a * b + b, *[ROW.astype(jnp.bfloat16)] * 2),
    "integers": (lambda x, n: jax.lax.div(x, jnp.full_like(x, n)), jnp.arange(8), 3),
    "a sum over the leaf": (lambda x: x * jnp.sum(x), ROW),
    "functions that are called": (of_many_calls, ROW),
    "results that are inputs": (lambda x, y: (y, x, jnp.maximum(x, 3.0)), ROW, 2 * ROW),
    **{
        f"a {dtype} {x}": (lambda a, s: jnp.where(s.astype(bool), a, -a), ROW, s)
        for dtype in ("bool", "int32", "bfloat16", "float32")
        for x in (0, 1)
        for s in [jnp.asarray(x, dtype)]
    },
    **{
        f"branch {i} of {n}": (
            lambda x, i, n=n: jax.lax.switch(
                i, [lambda x: x + 1, lambda x: x * 3, lambda x: -x][:n], x
            ),
            *(ROW, jnp.int32(i)),
        )
        for i in (-1, 0, 1, 2, 7)
        for n in (2, 3)
    },
}


def test_programs_of_small_functions_compute_them():
    for name, (function, *arrays) in FUNCTIONS.items():
        want = jax.tree.leaves(function(*arrays))
        for a, b in zip(run(function, *arrays), want, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)


def test_operations_that_are_not_elementwise_are_refused_with_their_shapes():
    with pytest.raises(
        NotElementwise, match=r"cumsum of \[8\] to \[8\] is not among the"
    ):
        program_from(jnp.cumsum, ROW)
    with pytest.raises(NotElementwise, match=r"a constant array of shape \[8\]"):
        program_from(lambda x: x + np.float32(ROW), ROW)


# ScalarTable.

SCALARS = [
    True,
    False,
    jnp.int32(-5),
    jnp.uint32(2**32 - 1),
    jnp.float32(-0.0),
    jnp.float32(jnp.nan),
    jnp.float32(1e-45),
    jnp.bfloat16(-1.5),
    jnp.float16(65504),
    jnp.float8_e4m3fn(0.4375),
    jnp.int8(-128),
    jnp.int16(-2),
]


@jax.jit
def there_and_back(scalars):
    words = elementwise.encode_scalars(scalars)
    back = zip(words, scalars, strict=True)
    return [elementwise.decode_scalar(word, x.dtype) for word, x in back]


def test_scalars_come_back_from_their_words():
    scalars = [jnp.asarray(x) for x in SCALARS]
    assert_same_bits(there_and_back(scalars), scalars)


def test_scalars_of_more_than_32_bits_are_refused():
    with (
        jax.enable_x64(True),
        pytest.raises(NotElementwise, match=r"it computes in float64"),
    ):
        program_from(lambda x, s: x * s, ROW, jnp.float64(2))
