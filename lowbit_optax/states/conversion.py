"""``convert``: go on with a run in other formats, or with plain optax.

    params, state --- read (decoded.py) ---> masters, moments, all in float32
                                                        |
    params, state <-- store, by to_tx's formats --------+

A pair or moment whose format stays the same is not read, but handed on as it is stored.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.random_bits import DrawsToNearest, ToNearest
from lowbit_optax._numerics.rounding import narrow_or_cast
from lowbit_optax._step import context, trees
from lowbit_optax._step.kept_float32 import KeepFloat32, dtypes_of, is_bias_or_norm
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.seeds import seed_of
from lowbit_optax._step.state import LowbitState
from lowbit_optax._types import OptState, Params, Transformation
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled_weights import BlockScaledWeights
from lowbit_optax.formats.quantized_tensor import QuantizedTensor
from lowbit_optax.states.decoded import (
    DecodedRun,
    Part,
    Recorded,
    decoded_run,
    recorded_nodes,
)
from lowbit_optax.states.matching import matched
from lowbit_optax.states.state_leaves import KeyPath, owner_and_field


def convert(
    params: Params,
    state: OptState,
    from_tx: Transformation,
    to_tx: Transformation,
    *,
    dtype: typing.Any = None,
    keep_float32: KeepFloat32 = is_bias_or_norm,
) -> tuple[Params, OptState]:
    """Go on with a run in other formats: other weights, moments, bits, or plain optax.

        (param, residual) --join--> float32 master --split--> (param', residual')
        codes, scales ---decode--> float32 moment --encode--> codes', scales'

    Both transformations must keep the same moments. They may differ in weight and
    moment formats, ``block_size``, ``min_size``, seed and implementation, in the
    parameters' dtypes, and in hyperparameters, schedules, clipping, weight decay, masks
    and wrappers. ``lowbit`` may be in another place: ``chain(clip, lowbit(adamw))`` and
    ``lowbit(chain(clip, adamw))`` keep the same moments.

    Scalars of the state, such as counts, hyperparameters and loss scales, keep their
    current values. A new count, for example of a schedule, starts at the number of
    steps that the run has made, and any other new scalar starts with its initial value.
    If a mask excludes a parameter, its moments are dropped.

    Exact, bit for bit:

    - What keeps its format and dtype, or bits, is handed on as it is stored.
    - Weights, to float32 parameters, ``master_copy()`` and ``extra_bits()`` of
      bfloat16; from ``extra_bits(k)`` to as many bits or more, and, for k up to 8, to
      ``kahan()``; and so back again. The parameter itself may become its neighbour
      where the master is halfway between the two.
    - Moments, to float32; from ``cast(dtype)`` by float32 and back.

    Rounded once, to nearest, also where the format's steps round stochastically:

    - Weights that the new format cannot hold. A compensation of ``kahan()`` below
      2^-25 of the weight is lost in a float32 master.
    - Moments into ``cast`` and ``block_quantized``; the latter also where they come
      back from float32, because their blocks may get other scales.
    - Sums that a wrapper keeps in the parameters' dtype, where that gets narrower.

    It works on sharded arrays, which it leaves where they are. Under ``jax.jit`` it is
    faster, and does not keep the float32 arrays of all leaves at once.

    Args:
      params: tree of parameters.
      state: ``from_tx``'s state of these parameters.
      from_tx: the transformation that ``state`` was made by.
      to_tx: the transformation to go on with.
      dtype, keep_float32: of the new parameters, as of :func:`from_master`. A tree may
        have arrays and shapes in it as well, for their dtypes; a quantised weight
        (``jax.eval_shape`` of :func:`quantize_params` or of :func:`block_scale`) stands
        for one like it. If ``dtype`` is None, parameters keep theirs; but those that
        ``from_tx`` holds in few bits, and ``to_tx`` does not, become float32.

    Returns:
      ``(params, state)`` for ``to_tx``.

    Raises:
      ValueError: if ``state`` is not one of ``from_tx`` for ``params``, if only one of
        the transformations keeps some moment, or if the weight format of ``to_tx``
        cannot hold a leaf. The error names the leaf, what was given and what is
        accepted.
      TypeError: if a leaf is no array, or ``dtype`` has something else in it.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> lowbit = lowbit_optax.extra_bits_adamw(1e-3)
    >>> params, state = lowbit_optax.from_master(lowbit, jnp.full((1, 3), 0.1))
    >>> params, state = convert(params, state, lowbit, optax.adamw(1e-3))
    >>> params
    Array([[0.1, 0.1, 0.1]], dtype=float32)
    >>> convert(params, state, optax.adamw(1e-3), lowbit, dtype=jnp.bfloat16)[0]
    Array([[0.100098, 0.100098, 0.100098]], dtype=bfloat16)
    """
    source = decoded_run(from_tx, params, state)
    shapes = _new_shapes(source, params, to_tx, dtype, keep_float32)
    names, leaves, treedef = trees.named_leaves(shapes)
    by_name = dict(zip(names, leaves, strict=True))
    nodes, around = recorded_nodes(to_tx, shapes)
    plans: dict[int, MomentPlan] = {}
    formats: dict[str, WeightFormat | None] = {}
    for i, (_, node) in enumerate(nodes):
        if isinstance(node, Recorded):
            stored = node.leaves("to_tx", by_name)
            plans[i] = node.plan(stored)
            node.config.check_start(stored, plans[i].expected)
            formats |= {leaf.name: leaf.format for leaf in stored}
    wanted = [
        plans[i].expected if i in plans else node for i, (_, node) in enumerate(nodes)
    ]
    pairs = {
        name: _pair(source, name, leaf, formats.get(name))
        for name, leaf in by_name.items()
    }
    initial = functools.partial(_initial, to_tx, shapes)
    old, new = source.state, around.unflatten(wanted)
    parts = around.flatten_up_to(matched(shapes, old, new, source.steps, initial))
    new = [
        _lowbit_state(node, plans[i], path, part, pairs, source)
        if i in plans
        else _carried(path, part, node, source)
        for i, ((path, node), part) in enumerate(zip(nodes, parts, strict=True))
    ]
    return treedef.unflatten(pairs[name][0] for name in names), around.unflatten(new)


def _pair(source: DecodedRun, name: str, like, format_: WeightFormat | None):
    """The new parameter of a leaf, and its residual in a weight format."""
    param, stored = source.params[name], source.leaves.get(name)
    old, residual = (stored.format, stored.residual) if stored else (None, None)
    is_same = old == format_ or isinstance(like, QuantizedTensor)
    if trees.abstract(param) == like and is_same:
        return param, residual
    master = source.master(name)
    if trees.is_quantized(like) and not isinstance(format_, BlockScaledWeights):
        return like.quantized(master), None
    if format_ is None:
        return narrow_or_cast(master, like.dtype), None
    param = format_.round(master, like.dtype, ToNearest())
    return param, format_.residual(master, param, ToNearest())


def _lowbit_state(
    node: Recorded,
    plan: MomentPlan,
    where: KeyPath,
    inner_state,
    pairs: dict[str, tuple],
    source: DecodedRun,
) -> LowbitState:
    """The state of a ``lowbit`` of ``to_tx``, which lies at the path ``where``.

    ``inner_state`` is that of the old state, of Parts; ``pairs`` are the new parameters
    and residuals by path.
    """
    wanted, treedef = jax.tree_util.tree_flatten_with_path(plan.expected)
    old = treedef.flatten_up_to(inner_state)
    where = (*where, jax.tree_util.GetAttrKey("inner_state"))
    parts = [
        _carried((*where, *path), part, want, source)
        for (path, want), part in zip(wanted, old, strict=True)
    ]
    unchanged = set()
    for i, (part, storage) in enumerate(zip(old, plan.storage, strict=True)):
        # A moment that is relative to another one, whose format changes, would get the
        # same codes again: see _numerics.relative.
        if storage and storage.format and storage.format == part.format:
            parts[i] = part.stored
            unchanged.add(i)
    draws = dict.fromkeys(node.names, DrawsToNearest())
    residuals = [pairs[name][1] for name in node.names]
    drawn = (source.noise[name] for name in node.names if name in source.noise)
    given, count, seed = next(drawn, (None, jnp.zeros([], jnp.uint32), None))
    if given != node.config.seed:
        seed = seed_of(node.config.seed, [pairs[name][0] for name in node.names])
    return LowbitState(
        count,
        typing.cast(jax.Array, seed),
        node.config.residuals(node.treedef, residuals, plan.leaves),
        plan.tree(treedef, plan.encode(parts, draws, unchanged)),
    )


def _carried(path: KeyPath, part: Part, want, source: DecodedRun) -> typing.Any:
    """An array of the state in the dtype that the new transformation keeps."""
    value = part.value
    if isinstance(value, int | float):  # a hyperparameter set by hand
        return jnp.asarray(value, want.dtype)
    if value.shape == want.shape:
        owner, _ = owner_and_field(path, source.params)
        is_of_a_float = owner is None or trees.is_float(source.params[owner])
        # The first step makes floats of what optax keeps of integers and booleans.
        if value.dtype == want.dtype or not is_of_a_float:
            return value
        if trees.is_float(value) and trees.is_float(want):
            return narrow_or_cast(value, want.dtype)
    raise ValueError(
        f"convert: state{jax.tree_util.keystr(path)} is {trees.describe(want)} in "
        f"to_tx, but {trees.describe(value)} in from_tx; accepted are transformations "
        "that keep the same arrays"
    )


def _initial(to_tx: Transformation, shapes, numbers: list[int]) -> list[Part]:
    """Some leaves of a new state of ``to_tx`` that no format has encoded."""

    @jax.jit  # so that no other leaf is allocated
    def init():
        is_float = lambda x: trees.is_quantized(x) or trees.is_float(x)
        wide = lambda x: jnp.float32 if is_float(x) else x.dtype
        zeros = lambda x: jnp.zeros(x.shape, wide(x))
        params = jax.tree.map(zeros, shapes, is_leaf=trees.is_quantized)
        leaves = jax.tree.leaves(to_tx.init(params))
        return [leaves[number] for number in numbers]

    with context.changed(start=lambda config, params: config.inner.init(params)):
        return [Part(x, x) for x in init()]


def _new_shapes(source: DecodedRun, params, to_tx, dtype, keep_float32: KeepFloat32):
    """The parameters to be made: a tree of shapes, and quantised weights of shapes."""
    names, leaves, treedef = trees.named_leaves(params)
    if dtype is not None:
        dtypes = dtypes_of("convert: dtype", params, dtype, keep_float32)
        kinds = trees.leaves_of_prefix("convert: dtype", dtypes, params)
        return treedef.unflatten(map(_shape, names, leaves, kinds))
    logical = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    nodes, _ = recorded_nodes(to_tx, treedef.unflatten(logical))
    low = {x for _, node in nodes if isinstance(node, Recorded) for x in node.names}
    # What plain optax would otherwise train without its low bits.
    widened = {
        name
        for name, leaf in source.leaves.items()
        if leaf.format is not None and name not in low
    }
    return treedef.unflatten(
        jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        if name in widened
        else trees.abstract(leaf)
        for name, leaf in zip(names, leaves, strict=True)
    )


def _shape(name: str, leaf, kind):
    """The new leaf's shape, of a dtype or like an array or a quantised weight."""
    if not trees.is_float(leaf):
        return trees.abstract(leaf)
    is_array = hasattr(kind, "shape") and not isinstance(kind, np.dtype | type)
    if is_array and tuple(kind.shape) != tuple(leaf.shape):
        raise ValueError(
            f"convert: params{name} has shape {list(leaf.shape)}, but dtype has "
            f"{list(kind.shape)} there"
        )
    if trees.is_quantized(kind):
        quantized: typing.Any = kind
        with trees.naming(name):
            quantized.check()
        return trees.abstract(kind)
    try:
        given = getattr(kind, "dtype", None) if is_array else kind
        dtype = float_dtype("convert: dtype", given)
    except TypeError as error:
        raise TypeError(
            f"convert: dtype has {kind!r} for params{name}; accepted are "
            "floating-point dtypes such as bfloat16, arrays, and quantised weights"
        ) from error
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
