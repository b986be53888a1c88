"""``convert`` changes the formats of a run, or converts it to plain optax.

    params, state --- decode (decoded.py) ---> masters and moments, all in float32
                                                        |
    params, state <-- encode in to_tx's formats --------+

Weights and moments whose format does not change are passed through unchanged.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import check_transformation
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.random_bits import DrawsToNearest, ToNearest
from lowbit_optax._numerics.rounding import narrow_or_cast
from lowbit_optax._step import context, trees
from lowbit_optax._step.float32_params import is_bias_or_norm, warn_of_wide_params
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.seeds import seed_of
from lowbit_optax._step.state import LowbitState
from lowbit_optax._types import OptState, Params, Transformation
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled import BlockScaledWeights
from lowbit_optax.formats.quantized_tensor import QuantizedTensor
from lowbit_optax.states.decoded import (
    DecodedRun,
    Part,
    Recorded,
    decoded_run,
    recorded_nodes,
)
from lowbit_optax.states.masters import check_range, dtypes_under
from lowbit_optax.states.matching import matched
from lowbit_optax.states.state_leaves import KeyPath, owner_and_field


def convert(
    params: Params,
    state: OptState,
    from_tx: Transformation,
    to_tx: Transformation,
    *,
    dtype: typing.Any = None,
) -> tuple[Params, OptState]:
    """Convert a run to other formats for weights and moments, or to plain optax.

        (param, residual) --join--> float32 master --split--> (param', residual')
        codes, scales ---decode--> float32 moment --encode--> codes', scales'

    Both transformations must keep the same moments. They may differ in weight and
    moment formats, ``block_size``, ``min_size``, seed, implementation, dtypes of the
    parameters, hyperparameters, schedules, clipping, weight decay, masks and wrappers.
    ``lowbit`` may be in another place, because ``chain(clip, lowbit(adamw))`` and
    ``lowbit(chain(clip, adamw))`` keep the same moments.

    Scalars of the state, such as counts, hyperparameters and loss scales, keep their
    values. A new count, for example of a schedule, starts at the number of updates that
    the run has made, or at 0 if the old state does not count them, as with
    ``accumulate_gradients(optax.sgd(...), 2)``. Other new scalars start with their
    initial values. If a mask excludes a parameter, its moments are dropped. New sums of
    gradients, as in ``optax.MultiSteps`` and :func:`accumulate_gradients`, start at
    zero, and sums that only ``from_tx`` keeps are dropped, so convert right after an
    update.

    These conversions are exact, bit for bit:

    - Arrays that keep their format and dtype, and quantized weights that keep their
      bits.
    - Weights to float32 parameters, ``master_copy()``, and bfloat16 with
      ``extra_bits()``; weights from ``extra_bits(k)`` to at least k extra bits, and, if
      k is at most 8, to ``kahan()``; and all of these conversions back. If a master is
      halfway between two parameters, the parameter may change to the other one.
    - Moments to float32, and moments of ``cast(dtype)`` to float32 and back.

    These conversions round once, to nearest, even if steps in the new format round
    stochastically:

    - Weights that the new format cannot represent. A compensation of ``kahan()`` below
      2^-25 of the weight is lost in a float32 master.
    - Moments to ``cast`` and ``block_quantized``. For ``block_quantized``, this
      includes moments that were converted to float32 and back, because scales may
      change.
    - Sums that a wrapper keeps in the parameters' dtype, if the dtype becomes narrower.

    Sharded arrays stay where they are, and state in host memory is copied to the
    device. Under ``jax.jit``, conversion is faster, and does not keep the float32
    arrays of all leaves at the same time.

    Args:
      params: tree of parameters.
      state: state of ``from_tx`` for these parameters.
      from_tx: the transformation that made ``state``.
      to_tx: the transformation that continues the run.
      dtype: selects the new dtypes, as in :func:`from_master`. One dtype does not apply
        to biases and normalizations; a tree of dtypes selects the dtype of each leaf.
        It may also contain arrays and shapes, for their dtypes, and quantized weights
        (``jax.eval_shape`` of :func:`quantize_params` or :func:`block_scale`), for
        weights of this kind. If ``dtype`` is None, float32 matrices that ``to_tx``
        stores in a weight format and ``from_tx`` does not become bfloat16, as in
        :func:`from_master`; weights in a format of ``from_tx`` become float32 if
        ``to_tx`` has no format for them; and other parameters keep their dtypes.

    Returns:
      ``(params, state)`` for ``to_tx``.

    Raises:
      ValueError: if ``state`` does not match ``from_tx`` and ``params``, if only one
        transformation keeps a moment, or if the weight format of ``to_tx`` does not
        support a leaf, or if a weight is too large for its new dtype. The message names
        the leaf.
      TypeError: if a leaf is not an array, or ``dtype`` contains an unsupported value.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> lowbit = lowbit_optax.extra_bits_adamw(1e-3)
    >>> params, state = lowbit_optax.from_master(lowbit, jnp.full((1, 3), 0.1))
    >>> params, state = convert(params, state, lowbit, optax.adamw(1e-3))
    >>> params
    Array([[0.1, 0.1, 0.1]], dtype=float32)
    >>> convert(params, state, optax.adamw(1e-3), lowbit)[0]
    Array([[0.100098, 0.100098, 0.100098]], dtype=bfloat16)
    """
    check_transformation("convert", "from_tx", from_tx)
    check_transformation("convert", "to_tx", to_tx)
    source = decoded_run(from_tx, params, state)
    shapes = _new_shapes(source, params, to_tx, dtype)
    names, leaves, treedef = trees.named_leaves(shapes)
    by_name = dict(zip(names, leaves, strict=True))
    nodes, around = recorded_nodes(to_tx, shapes)
    plans: dict[int, MomentPlan] = {}
    formats: dict[str, WeightFormat | None] = {}
    for i, (_, node) in enumerate(nodes):
        if isinstance(node, Recorded):
            stored = node.leaves("to_tx", by_name)
            if node.config.warn:
                new_params = [leaf.param for leaf in stored]
                warn_of_wide_params(node.config.weights, node.names, new_params)
            plans[i] = node.plan(stored)
            node.config.check_start(stored, plans[i].expected)
            formats |= {leaf.name: leaf.format for leaf in stored}
    wanted = [plans[i].expected if i in plans else x for i, (_, x) in enumerate(nodes)]
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
    """Return the new parameter of a leaf, and its residual in a weight format."""
    param, stored = source.params[name], source.leaves.get(name)
    old, residual = (stored.format, stored.residual) if stored else (None, None)
    is_same = old == format_ or isinstance(like, QuantizedTensor)
    if trees.abstract(param) == like and is_same:
        return param, residual
    master = source.master(name)
    if trees.is_quantized(like) and not isinstance(format_, BlockScaledWeights):
        return like.quantized(master), None
    check_range(f"convert: params{name}", master, like.dtype)
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
    """Return the state of the ``lowbit`` at the path ``where`` of the new state.

    ``inner_state`` contains the Parts of the old state. ``pairs`` maps the path of each
    parameter to the new parameter and its residual.
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
        # A moment whose format does not change keeps its codes.
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
    """Return an array of the old state in the dtype that the new state needs."""
    value = part.value
    if isinstance(value, int | float):  # a hyperparameter that the user set
        return jnp.asarray(value, want.dtype)
    if value.shape == want.shape:
        owner, _ = owner_and_field(path, source.params)
        is_of_a_float = owner is None or trees.is_float(source.params[owner])
        if value.dtype == want.dtype:
            return value
        if trees.is_float(want) and (trees.is_float(value) or not is_of_a_float):
            return narrow_or_cast(value, want.dtype)
        # In the first step, optax replaces its integers and booleans with floats.
        if not is_of_a_float:
            return value
    raise ValueError(
        "convert: from_tx and to_tx must keep the same arrays, but "
        f"state{jax.tree_util.keystr(path)} is {trees.describe(value)} in from_tx and "
        f"{trees.describe(want)} in to_tx"
    )


def _initial(to_tx: Transformation, shapes, numbers: list[int]) -> list[Part]:
    """Return the leaves with these indices in a new, unencoded state of ``to_tx``."""

    @jax.jit  # so that no other leaf is allocated
    def init():
        wide = lambda x: jnp.float32 if trees.is_float(x) else x.dtype
        zeros = lambda x: jnp.zeros(x.shape, wide(x))
        params = jax.tree.map(zeros, shapes, is_leaf=trees.is_quantized)
        leaves = jax.tree.leaves(to_tx.init(params))
        return [leaves[number] for number in numbers]

    with context.changed(start=lambda config, params: config.inner.init(params)):
        return [Part(x, x) for x in init()]


def _new_shapes(source: DecodedRun, params, to_tx, dtype):
    """Return the shapes and dtypes of the new parameters."""
    names, leaves, treedef = trees.named_leaves(params)
    what = "convert: dtype"
    dtypes = dtypes_under(to_tx, what, params, dtype, is_bias_or_norm, source.leaves)
    kinds = trees.leaves_of_prefix(what, dtypes, params)
    return treedef.unflatten(map(_shape, names, leaves, kinds))


def _shape(name: str, leaf, kind):
    """Return the abstract parameter that ``kind`` selects; see :func:`convert`."""
    if not trees.is_float(leaf):
        return trees.abstract(leaf)
    what = f"convert: dtype for params{name}"
    is_array = hasattr(kind, "shape") and not isinstance(kind, np.dtype | type)
    if is_array and tuple(kind.shape) != tuple(leaf.shape):
        raise ValueError(
            f"{what} must have shape {list(leaf.shape)}, got {list(kind.shape)}"
        )
    if trees.is_quantized(kind):
        with trees.naming(name):
            typing.cast(typing.Any, kind).check()
        return trees.abstract(kind)
    kind = getattr(kind, "dtype", None) if is_array else kind
    return trees.abstract(jax.ShapeDtypeStruct(leaf.shape, float_dtype(what, kind)))
