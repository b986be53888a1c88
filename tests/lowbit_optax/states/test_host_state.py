"""A step on a state in host memory computes the same numbers, group by group."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend import core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax.states import host_memory, host_step
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion

HOST = "pinned_host"
RATE = 2.0**-7
LOWBIT = lowbit_optax.lowbit_adamw(RATE)
ADAMW = optax.adamw(RATE)


def over_norm_of_momentum():
    """Momentum divided by its norm over all leaves."""
    trace = optax.trace(0.5)

    def update(updates, state, params=None):
        updates, state = trace.update(updates, state, params)
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(updates)))
        return jax.tree.map(lambda x: -x / norm, updates), state

    return optax.GradientTransformation(trace.init, update)


STEPS = {
    "adamw": ADAMW,
    "clipped": optax.chain(optax.clip_by_global_norm(0.25), LOWBIT),
    "kahan_adamw": lowbit_optax.kahan_adamw(RATE),
    "lowbit_adamw": LOWBIT,
    "factored_adamw": lowbit_optax.factored_adamw(RATE),
    "mixed": over_norm_of_momentum(),
}


@pytest.fixture(autouse=True)
def one_leaf_in_each_group(monkeypatch):
    monkeypatch.setattr(host_step, "GROUP_BYTES", 2**10)


def problem(name):
    dtype = jnp.float32 if name in ("adamw", "mixed") else jnp.bfloat16
    shapes = {"in": (64, 64), "out": (64, 128), "bias": (64,)}
    keys = jax.random.split(jax.random.key(1), 2 * len(shapes))
    draw = lambda k, shape: (jax.random.normal(k, shape) / 8).astype(dtype)
    params = dict(zip(shapes, map(draw, keys[::2], shapes.values()), strict=True))
    grads = dict(zip(shapes, map(draw, keys[1::2], shapes.values()), strict=True))
    return STEPS[name], params, grads


def kinds(tree) -> list[str]:
    return [x.memory_kind for x in jax.tree.leaves(tree)]


def trained(tx, params, state, grads):
    """Params and state after two steps, which donate both."""
    step = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, params)
    for _ in range(2):
        params, state = step(params, state, grads)
    return params, state


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_are_those_of_the_state_on_the_device(name):
    tx, params, grads = problem(name)
    where = lowbit_optax.host_shardings(tx, params)
    state = jax.jit(lambda params: jax.device_put(tx.init(params), where))(params)
    want = trained(tx, params, tx.init(params), grads)
    new, new_state = trained(tx, params, state, grads)
    assert_same_bits((new, new_state), want)
    assert kinds(jax.tree.map(lambda x: x.sharding, new_state)) == kinds(where)
    assert kinds(jax.tree.map(lambda x: x.sharding, new)) == ["device"] * 3


def test_only_counts_and_scalars_are_on_the_device():
    tx = lowbit_optax.with_loss_scale(
        STEPS["kahan_adamw"], lowbit_optax.loss_scaling.backoff_scale()
    )
    where = lowbit_optax.host_shardings(tx, jnp.ones((64, 64), jnp.bfloat16))
    inner = where.inner_state
    assert set(kinds((where.scale, inner.count, inner.seed))) == {"device"}
    assert set(kinds(inner.residual)) == {HOST}
    counts, moments = inner.inner_state[0].count, inner.inner_state[0][1:]
    assert (kinds(counts), set(kinds(moments))) == (["device"], {HOST})


@pytest.mark.parametrize("name", ["adamw", "clipped"])
def test_each_group_is_copied_in_a_loop_of_its_own(name):
    tx, params, grads = problem(name)
    where = lowbit_optax.host_shardings(tx, params)
    state = jax.device_put(tx.init(params), where)
    step = functools.partial(lowbit_optax.step, tx)
    closed = jax.make_jaxpr(step)(params, state, grads)
    programs = [closed.jaxpr]
    if name == "clipped":
        # The step has kernels on CUDA, and keeps the random keys apart on CPUs.
        programs = [x.jaxpr for x in closed.eqns[-1].params["branches"]]
        assert len(programs) == 3
    for program in programs:
        # The first group is copied before its loop, and each loop copies the next one.
        first, loops = copies(program, into_loops=False), loops_of(program)
        assert len(loops) == len(params)
        of_each = [first, *map(copies, loops)]
        assert of_each.pop() == 0
        assert all(of_each)
        assert sum(of_each) == kinds(where).count(HOST)
    text = jax.jit(step).trace(params, state, grads).lower(lowering_platforms=("tpu",))
    # If XLA knew the number of iterations, it would inline the loops.
    assert text.as_text().count("stablehlo.optimization_barrier") == 1


def loops_of(jaxpr):
    """The bodies of the loops of a program."""
    loops = [x for x in jaxpr.eqns if x.primitive.name == "while"]
    return [x.params["body_jaxpr"].jaxpr for x in loops]


def copies(jaxpr, into_loops=True) -> int:
    """The number of arrays that a program copies from host memory to the device."""
    found = 0
    for eqn in jaxpr.eqns:
        to_device = jax.memory.Space.Device in eqn.params.get("devices", ())
        found += eqn.primitive.name == "device_put" and to_device
        if into_loops or eqn.primitive.name != "while":
            found += sum(map(copies, core.jaxprs_in_params(eqn.params)))
    return found


def test_every_trace_gives_the_same_program():
    # Processes that run one program together must compile the same one.
    tx, params, grads = problem("adamw")
    state, where = tx.init(params), lowbit_optax.host_shardings(tx, params)
    on_host = jax.device_put(state[0].mu, where[0].mu)
    state = state[0]._replace(mu=on_host), *state[1:]

    def program() -> str:
        # JAX caches the trace of a function, so each trace needs a new function.
        step = jax.make_jaxpr(lambda *arguments: lowbit_optax.step(tx, *arguments))
        return str(step(params, state, grads))

    assert len({program() for _ in range(6)}) == 1


def test_small_leaves_share_a_group(monkeypatch):
    tx, params, grads = problem("adamw")
    state = jax.device_put(tx.init(params), lowbit_optax.host_shardings(tx, params))
    sizes = {"bias": 2 * 256, "in": 2 * 2**14, "out": 2 * 2**15}
    for limit, count in ((sizes["bias"] + sizes["in"], 2), (sum(sizes.values()), 1)):
        monkeypatch.setattr(host_step, "GROUP_BYTES", limit)
        step = jax.make_jaxpr(functools.partial(lowbit_optax.step, tx))
        assert len(loops_of(step(params, state, grads).jaxpr)) == count


def test_leaves_whose_updates_depend_on_each_other_are_one_group():
    tx, params, grads = problem("mixed")
    state = jax.device_put(tx.init(params), lowbit_optax.host_shardings(tx, params))
    step = jax.make_jaxpr(functools.partial(lowbit_optax.step, tx))
    program = step(params, state, grads).jaxpr
    (loop,) = loops_of(program)
    assert (copies(program, into_loops=False), copies(loop)) == (len(params), 0)


def test_moments_that_change_their_dtype_stay_in_host_memory():
    _, params, _ = problem("kahan_adamw")
    tx, grads = optax.adam(RATE), jax.tree.map(lambda x: x.astype("float32"), params)
    where = lowbit_optax.host_shardings(tx, params)
    state = tx.init(params)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    want, got = (step(params, x, grads) for x in (state, jax.device_put(state, where)))
    assert state[0].mu["in"].dtype != got[1][0].mu["in"].dtype
    assert_same_bits(got, want)
    assert kinds(jax.tree.map(lambda x: x.sharding, got[1])) == kinds(where)


def test_a_step_outside_of_jit_puts_the_state_back():
    tx, params, grads = problem("adamw")
    where = lowbit_optax.host_shardings(tx, params)
    state = tx.init(params)
    want = lowbit_optax.step(tx, params, state, grads)
    got = lowbit_optax.step(tx, params, jax.device_put(state, where), grads)
    assert_same_bits(got, want)
    assert kinds(jax.tree.map(lambda x: x.sharding, got[1])) == kinds(where)


def test_train_states_step_in_host_memory():
    training = pytest.importorskip("lowbit_optax.training")
    tx, params, grads = problem("adamw")
    create = functools.partial(training.TrainState.create, apply_fn=None, tx=tx)
    train_step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    start = create(params=params)
    where = lowbit_optax.host_shardings(tx, params)
    on_host = start.replace(opt_state=jax.device_put(start.opt_state, where))
    got, want = train_step(on_host, grads), train_step(start, grads)
    assert_same_bits(got.params, want.params)
    assert_same_bits(got.opt_state, want.opt_state)
    assert kinds(jax.tree.map(lambda x: x.sharding, got.opt_state)) == kinds(where)


@pytest.mark.slow_to_compile
def test_sharded_state_keeps_its_shardings():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tx, params, grads = problem("kahan_adamw")
    placed = {name: NamedSharding(mesh, P("d")) for name in params}
    params, grads = jax.device_put((params, grads), (placed, placed))
    on_device = lowbit_optax.state_shardings(tx, params, placed)
    on_host = lowbit_optax.host_shardings(tx, params, placed)
    init = lambda where: jax.jit(lambda x: jax.device_put(tx.init(x), where))(params)
    want = trained(tx, params, init(on_device), grads)
    got = trained(tx, params, init(on_host), grads)
    assert_same_bits(got, want)
    pairs = zip(jax.tree.leaves(got[1]), jax.tree.leaves(on_host), strict=True)
    for array, sharding in pairs:
        assert array.sharding.memory_kind == sharding.memory_kind
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    with jax.set_mesh(mesh):
        by_spec = lowbit_optax.host_shardings(tx, jax.typeof(params["in"]), P("d"))
    assert by_spec.residual.tree.memory_kind == HOST


def test_shardings_of_the_transformation_are_used():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("d"))
    tx = lowbit_optax.kahan_adamw(RATE, param_shardings=by_rows)
    shape = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    where = lowbit_optax.host_shardings(tx, {"w": shape})
    assert where.residual.tree["w"] == by_rows.with_memory_kind(HOST)
    assert where.count == NamedSharding(mesh, P(), memory_kind="device")


def test_a_device_without_host_memory_is_named(monkeypatch):
    monkeypatch.setattr(host_memory, "_memory_kinds", lambda device: {"device"})
    tx, params, _ = problem("adamw")
    message = (
        r"host_shardings: state\[0\].mu\['bias'\] cannot be in 'pinned_host'.* 'device'"
    )
    with pytest.raises(ValueError, match=message):
        lowbit_optax.host_shardings(tx, params)


def test_weights_and_conversions_read_a_state_in_host_memory():
    tx, params, _ = problem("kahan_adamw")
    state = tx.init(params)
    on_host = jax.device_put(state, lowbit_optax.host_shardings(tx, params))
    masters = lowbit_optax.master_weights
    assert_same_bits(masters(params, on_host), masters(params, state))
    convert = lambda state: lowbit_optax.convert(params, state, tx, ADAMW)
    assert_same_bits(convert(on_host), convert(state))


def test_checkpoints_are_restored_into_host_memory(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx, params, _ = problem("lowbit_adamw")
    state, where = tx.init(params), lowbit_optax.host_shardings(tx, params)
    like = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        got = checkpointer.restore(tmp_path / "saved", jax.tree.map(like, state, where))
    assert kinds(jax.tree.map(lambda x: x.sharding, got)) == kinds(where)
    # JAX gives restored arrays the types of arrays on the device.
    got = jax.jit(lambda state: jax.device_put(state, where))(got)
    on_host = map(host_memory.is_on_host, jax.tree.leaves(got))
    assert [HOST if x else "device" for x in on_host] == kinds(where)
    assert_same_bits(got, state)
