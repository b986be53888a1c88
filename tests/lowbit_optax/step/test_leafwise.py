"""Per-leaf programs equal the inner transformation; other updates are refused."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import primitives as p
from optimizers import assert_same_bits

from lowbit_optax._jaxprs import elementwise, leaf_program
from lowbit_optax._jaxprs.elementwise import (
    NotElementwise,
    Program,
    Ref,
    Scalars,
)
from lowbit_optax._jaxprs.graph import Graph, evaluate

pytestmark = pytest.mark.standard_promotion

PARAMS = {"kernel": (8, 16), "bias": (16,)}


def draw(shapes, seed, scale=1.0):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * random.standard_normal(shape), jnp.float32)
        for name, shape in shapes.items()
    }


@dataclasses.dataclass
class Traced:
    """An inner update as a graph, with a program for each leaf.

    Its state is the one after two steps, so that no moment is zero.
    """

    inner: optax.GradientTransformation
    shapes: dict = dataclasses.field(default_factory=lambda: PARAMS)

    def __post_init__(self):
        update = self.inner.update
        params = draw(self.shapes, 0)
        state = self.inner.init(params)
        for seed in (1, 2):
            grads = draw(self.shapes, seed, 0.1)
            updates, state = jax.jit(update)(grads, state, params)
            params = optax.apply_updates(params, updates)
        self.arguments = draw(self.shapes, 3, 0.1), state, params
        self.want, self.new_state = jax.jit(update)(*self.arguments)
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(*self.arguments)
        self.graph = Graph(closed)
        self.inputs = jax.tree.unflatten(
            jax.tree.structure(self.arguments), self.graph.inputs
        )
        self.outputs = jax.tree.unflatten(
            jax.tree.structure(shapes), self.graph.outputs
        )
        self.scalars = Scalars(self.graph)

    @property
    def known(self):
        return dict(
            zip(self.graph.inputs, jax.tree.leaves(self.arguments), strict=True)
        )

    def nodes(self, name):
        """A leaf's inputs, its results, and what these should be."""
        shape = self.shapes[name]
        grads, state, params = self.inputs
        own = elementwise.inputs_of([self.outputs[0][name]], shape)
        old, new = jax.tree.leaves(state), jax.tree.leaves(self.outputs[1])
        reached = [elementwise.inputs_of([node], shape) for node in new]
        slots = [
            i
            for i, node in enumerate(old)
            if node.aval.shape == shape
            and (node in own or reached[i] & {grads[name], params[name]})
        ]
        inputs = [grads[name], params[name], *(old[i] for i in slots)]
        outputs = [self.outputs[0][name], *(new[i] for i in slots)]
        values = jax.tree.leaves(self.new_state)
        return inputs, outputs, [self.want[name], *(values[i] for i in slots)]

    def program(self, name):
        inputs, outputs, _ = self.nodes(name)
        return elementwise.program_of(outputs, inputs, self.scalars)

    def run(self, name):
        """The program's results, and those of the inner transformation."""
        program = self.program(name)
        inputs, _, want = self.nodes(name)
        known = self.known
        table = leaf_program.encode_scalars(evaluate(self.scalars.nodes, known) or [0])

        @jax.jit
        def run(rows, table):
            return program.run(rows, table, lambda a, b, c: a * b + c)

        return run([known[node] for node in inputs], table), want


DECAYED = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)

ELEMENTWISE = {
    "adamw": optax.adamw(0.01),
    "adamw_schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 0.1, 2, 9)),
    "adamw_masked": optax.adamw(0.01, weight_decay=0.1, mask=DECAYED),
    "adam_nesterov": optax.adam(0.01, nesterov=True),
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
    # Not among the exact: of a zero that waits for the last step XLA drops the sign.
    "multi_steps_waiting": optax.MultiSteps(optax.sgd(0.25, momentum=0.5), 4),
}

# No quotient by a scalar, and no sum of products that might be rounded once or twice.
EXACT = {
    "sgd": optax.sgd(0.25),
    "sgd_nesterov": optax.sgd(0.25, momentum=0.5, nesterov=True),
    "sign_sgd": optax.sign_sgd(0.25),
    "clip": optax.chain(optax.clip(0.05), optax.sgd(0.25, momentum=0.5)),
    "lion": optax.lion(0.25, b1=0.5, b2=0.5, weight_decay=0.5),
    "sgd_schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 9)),
    "multi_steps": optax.MultiSteps(optax.sgd(0.25, momentum=0.5), 3),
}

TRACED: dict[str, Traced] = {}


def traced(name):
    if name not in TRACED:
        TRACED[name] = Traced((ELEMENTWISE | EXACT)[name])
    return TRACED[name]


@pytest.mark.parametrize("leaf", PARAMS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_program_computes_what_the_inner_transformation_does(name, leaf):
    got, want = traced(name).run(leaf)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # A few units; of the masters where the update is a difference of these.
        size = 3.0 if name == "schedule_free" else np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1.2e-7 * size)


@pytest.mark.parametrize("leaf", PARAMS)
@pytest.mark.parametrize("name", EXACT)
def test_a_program_of_exact_operations_agrees_in_every_bit(name, leaf):
    got, want = traced(name).run(leaf)
    assert_same_bits(got, want)


def test_what_is_computed_once_a_step_is_a_scalar():
    one = traced("global_norm")
    program = one.program("kernel")
    used = {
        ref.number
        for operation in program.operations
        for ref in operation.inputs
        if ref.kind == "scalar"
    }
    assert used
    assert all(node.is_scalar for node in one.scalars.nodes)
    assert not any(
        operation.primitive is p.div_p and operation.inputs[1].kind != "row"
        for operation in program.operations
    )


ALIKE = [
    "adamw", "lion", "global_norm", "finite", "sgd_nesterov",
    "adamw_schedule", "clip", "injected",
]  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_leaves_that_are_alike_share_a_program_and_its_scalars(name):
    # Else no two small leaves share a launch, and each kernel is compiled once a leaf.
    shape = (8,)
    twins = Traced((ELEMENTWISE | EXACT)[name], {"a": shape, "b": shape})
    first = twins.program("a")
    scalars = twins.scalars.nodes
    second = twins.program("b")
    assert first == second
    assert hash(first) == hash(second)
    assert twins.scalars.nodes == scalars


REFUSED = {
    "muon": (optax.contrib.muon(0.01), r"\[16, 8\]|dot_general|is not elementwise"),
    "adafactor": (
        optax.adafactor(0.01, min_dim_size_to_factor=4),
        r"is not elementwise",
    ),
    "adaptive_grad_clip": (
        optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.01)),
        r"is not elementwise",
    ),
    "add_noise": (
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
        r"is not elementwise",
    ),
}


@pytest.mark.parametrize(("inner", "match"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_elementwise_update_is_refused_with_the_operation(inner, match):
    with pytest.raises(NotElementwise, match=match):
        Traced(inner).program("kernel")


# Programs from small functions.


def program_from(function, *arrays):
    graph = Graph(jax.make_jaxpr(function)(*arrays))
    inputs = [node for node in graph.inputs if not node.is_scalar]
    scalars = Scalars(graph)
    return elementwise.program_of(graph.outputs, inputs, scalars), scalars, graph


def run_small(function, *arrays):
    """The results of a function's program, its scalars through the table."""
    program, scalars, graph = program_from(function, *arrays)
    known = dict(zip(graph.inputs, arrays, strict=True))
    table = leaf_program.encode_scalars(evaluate(scalars.nodes, known) or [0])
    rows = [x for x in arrays if jnp.ndim(x)]
    return program.run(rows, table, lambda a, b, c: a * b + c)


ROW = jnp.arange(1.0, 9.0)


def names(program):
    return [str(operation.primitive) for operation in program.operations]


def test_a_program_is_independent_of_its_leafs_shape():
    def update(grad, rate):
        return grad * rate + jnp.sqrt(grad)

    small, _, _ = program_from(update, ROW, 0.5)
    large, _, _ = program_from(update, jnp.ones((5, 6, 7)), 0.5)
    assert small == large
    assert hash(small) == hash(large)


def corrected(mean, square, weight, first, second):
    quotient = (mean / first) / (jnp.sqrt(square / second) + 0.5)
    return weight - 0.1 * (quotient + 0.01 * weight)


def with_the_product(a, b):
    product = a * b
    return [product + b, product]


def quotient_of_integers(x, n):
    return jax.lax.div(x, jnp.full_like(x, n))


CORRECTIONS = jnp.float32(0.3), jnp.float32(0.2)
OPERATIONS = {
    "corrections of averages are products": (
        (corrected, ROW, ROW + 1, ROW - 5, *CORRECTIONS),
        ["mul", "mul", "sqrt", "add", "div", "multiply_add", "mul", "sub"],
    ),
    "a scalar over an array": ((lambda x, s: s / x, ROW, 4.0), ["div"]),
    "a product in a sum": ((lambda a, b, c: a * b + c, *[ROW] * 3), ["multiply_add"]),
    "a product that others read": ((with_the_product, ROW, ROW), ["mul", "add"]),
    "a narrow product": (
        (lambda a, b: a * b + b, *[ROW.astype(jnp.bfloat16)] * 2),
        ["mul", "add"],
    ),
    "a quotient by a float scalar": ((lambda x, s: x / s, ROW, 4.0), ["mul"]),
    "a quotient of arrays": ((lambda x, y: x / y, ROW, ROW), ["div"]),
    "a quotient of integers": ((quotient_of_integers, jnp.arange(8), 3), ["div"]),
    "a sum over the leaf is a scalar": ((lambda x: x * jnp.sum(x), ROW), ["mul"]),
}


@pytest.mark.parametrize(("update", "operations"), OPERATIONS.values(), ids=OPERATIONS)
def test_a_program_has_as_few_operations_as_it_may(update, operations):
    function, *arrays = update
    program, _, _ = program_from(function, *arrays)
    assert names(program) == operations
    got, want = run_small(function, *arrays), jax.tree.leaves(function(*arrays))
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_constants_are_part_of_a_program_and_other_arrays_are_refused():
    program, scalars, _ = program_from(lambda x: jnp.maximum(x, 3.0), ROW)
    assert not scalars.nodes
    three = Ref("constant", 0, np.dtype("float32"), np.float32(3).tobytes())
    assert three in program.operations[0].inputs
    with pytest.raises(NotElementwise, match=r"a constant array of shape \[8\]"):
        program_from(lambda x: x + np.arange(8, dtype=np.float32), ROW)
    graph = Graph(jax.make_jaxpr(jnp.add)(ROW, ROW))
    with pytest.raises(NotElementwise, match=r"uses another array of shape \[8\]"):
        elementwise.program_of(graph.outputs, graph.inputs[:1], Scalars(graph))


NOT_ELEMENTWISE = {
    "transpose": (
        lambda x: x.reshape(2, 4).T.reshape(8),
        r"reshape of .* is not elementwise",
    ),
    "cumsum": (jnp.cumsum, r"cumsum of \[8\] to \[8\] is not elementwise"),
    "sorted": (jnp.sort, r"sort of \[8\] to \[8\] is not elementwise"),
    "iota": (lambda x: x + jnp.arange(8.0), "iota of nothing to .* is not elementwise"),
    "broadcast": (lambda x: x * x[:1], "is not elementwise"),
    "reverse": (lambda x: x[::-1] + x, r"rev of \[8\] to \[8\] is not elementwise"),
}


@pytest.mark.parametrize(
    ("function", "match"), NOT_ELEMENTWISE.values(), ids=NOT_ELEMENTWISE
)
def test_the_reason_names_the_operation_and_its_shapes(function, match):
    with pytest.raises(NotElementwise, match=match):
        program_from(function, ROW)


# Scalars.


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


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_scalars_come_back_from_their_words(jit):
    scalars = [jnp.asarray(x) for x in SCALARS]

    @jit
    def there_and_back(scalars):
        words = leaf_program.encode_scalars(scalars)
        assert (words.dtype, words.shape) == (jnp.uint32, (len(scalars),))
        back = zip(words, scalars, strict=True)
        return [leaf_program.decode_scalar(word, x.dtype) for word, x in back]

    assert_same_bits(there_and_back(scalars), scalars)


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float32"])
def test_programs_read_scalars_of_any_dtype(dtype):
    def update(row, scalar):
        return jnp.where(scalar.astype(bool), row, -row)

    for value in (0, 1):
        scalar = jnp.asarray(value, dtype)
        assert_same_bits(run_small(update, ROW, scalar), [update(ROW, scalar)])


def test_scalars_of_more_than_32_bits_are_refused():
    with (
        jax.enable_x64(True),
        pytest.raises(NotElementwise, match=r"it computes in float64"),
    ):
        program_from(lambda x, s: x * s, ROW, jnp.float64(2))


# Graphs.


def counting(seen, name):
    """The identity, which notes that it ran."""

    def run(x):
        seen.append(name)
        return np.asarray(x)

    return lambda x: jax.pure_callback(run, jax.ShapeDtypeStruct((), jnp.float32), x)


def test_evaluate_computes_what_is_needed_and_only_once():
    seen = []
    a, b = counting(seen, "a"), counting(seen, "b")
    graph = Graph(jax.make_jaxpr(lambda x: (a(x) + 1, b(x), a(x) * 0))(jnp.float32(3)))
    known = {graph.inputs[0]: jnp.float32(3)}
    assert evaluate(graph.outputs[:1], known) == [4.0]
    jax.effects_barrier()
    assert seen == ["a"]
    assert evaluate(graph.outputs[:2], known) == [4.0, 3.0]
    jax.effects_barrier()
    assert seen == ["a", "b"]
    with pytest.raises(KeyError, match="no value"):
        evaluate(graph.outputs, {})


def test_evaluate_goes_on_from_values_in_the_middle():
    graph = Graph(jax.make_jaxpr(lambda x: (jnp.exp(x), jnp.exp(x) + 1))(1.0))
    inner = graph.outputs[1].call.inputs[0]
    assert evaluate(graph.outputs[1:], {inner: jnp.float32(6)}) == [7.0]


def function_of_many_calls(x):
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), tangents[0]))
    square = jax.jit(lambda x: x * x)
    return jax.checkpoint(lambda x: cube(x) + square(x))(x) + jnp.clip(x, 0.0, 1.0)


def test_called_functions_are_inlined():
    program, _, _ = program_from(function_of_many_calls, ROW)
    chex.assert_trees_all_close(
        run_small(function_of_many_calls, ROW), [function_of_many_calls(ROW)]
    )
    assert {"jit", "custom_jvp_call", "checkpoint"}.isdisjoint(names(program))


@pytest.mark.parametrize("which", [-1, 0, 1, 2, 7])
@pytest.mark.parametrize("branches", [2, 3])
def test_a_conditional_is_a_selection(branches, which):
    options = [lambda x: x + 1, lambda x: x * 3, lambda x: -x][:branches]

    def update(x, which):
        return jax.lax.switch(which, options, x)

    arguments = ROW, jnp.int32(which)
    program, _, _ = program_from(update, *arguments)
    assert "cond" not in names(program)
    assert_same_bits(run_small(update, *arguments), [update(*arguments)])


def test_a_conditional_whose_branches_cost_much_stays_one():
    def update(x, which):
        expensive = lambda x: jnp.dot(x.reshape(4, 2), x.reshape(2, 4)).sum()
        return jax.lax.cond(which, expensive, jnp.sum, x)

    arguments = ROW, jnp.bool_(True)
    graph = Graph(jax.make_jaxpr(update)(*arguments))
    assert graph.outputs[0].call.primitive is p.cond_p
    known = dict(zip(graph.inputs, arguments, strict=True))
    chex.assert_trees_all_close(evaluate(graph.outputs, known), [update(*arguments)])


def test_a_program_without_operations_gives_its_inputs():
    program, _, _ = program_from(lambda x, y: (y, x), ROW, 2 * ROW)
    assert program == Program(2, (), (Ref("row", 1), Ref("row", 0)))
    assert_same_bits(program.run([ROW, 2 * ROW], None, None), [2 * ROW, ROW])
