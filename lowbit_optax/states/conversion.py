"""``convert``: go on with a run in other formats, or with plain optax.

    params, state --- read (decoded.py) ---> masters, moments, all in float32
                                                        |
    params, state <-- store, by to_tx's formats --------+

A pair or moment whose format stays the same is not read, but handed on as it is stored.
"""

import dataclasses
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.random_bits import DrawsToNearest, ToNearest
from lowbit_optax._numerics.rounding import narrow_or_cast
from lowbit_optax._step import trees
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.state import LowbitState
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_tensor import quantize
from lowbit_optax.states.decoded import (
    DecodedRun,
    Part,
    decoded_run,
    formats_of_parts,
)
from lowbit_optax.states.dtypes import of_leaves
from lowbit_optax.states.recorded import Recorded, is_recorded, recorded_state


def convert(
    params: optax.Params,
    state: optax.OptState,
    from_tx: optax.GradientTransformation,
    to_tx: optax.GradientTransformation,
    *,
    dtypes: typing.Any = None,
) -> tuple[optax.Params, optax.OptState]:
    """Go on with a run in other formats: other weights, moments, bits, or plain optax.

        (param, residual) --join--> float32 master --split--> (param', residual')
        codes, scales ---decode--> float32 moment --encode--> codes', scales'

    Both transformations must do the same in float32: they may differ in weight and
    moment formats, ``block_size``, ``min_size``, seed and implementation, in the
    parameters' dtypes, and in where ``lowbit`` stands: ``chain(clip, lowbit(adamw))``,
    ``lowbit(chain(clip, adamw))`` and ``chain(clip, adamw)`` are one in this. Wrappers
    (``chain``, ``MultiSteps``, ``masked``, ``partition``, ``inject_hyperparams``,
    ``with_loss_scale``, ``accumulate_gradients``) stay, with their state: counts,
    hyperparameters as they are at present, loss scales.

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
      dtypes: of the new parameters: one dtype, or a tree that is a prefix of
        ``params``, of dtypes, arrays or shapes, such as :func:`param_dtypes` makes. A
        QuantizedTensor in it (``jax.eval_shape`` of :func:`quantize_params`) stands for
        one of the same bits and block size. If None, parameters keep theirs; but those
        that ``from_tx`` holds in few bits, and ``to_tx`` does not, become float32.
        So float32 parameters stay float32, which ``lowbit`` lets pass.

    Returns:
      ``(params, state)`` for ``to_tx``.

    Raises:
      ValueError: if ``state`` is not one of ``from_tx`` for ``params``, if ``to_tx``
        keeps other state in float32, or if its weight format cannot hold a leaf. The
        error names the leaf, what was given and what is accepted.
      TypeError: if a leaf is no array, or ``dtypes`` has something else in it.

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> lowbit = lowbit_optax.extra_bits_adamw(1e-3)
    >>> params, state = lowbit_optax.from_master(lowbit, jnp.full(3, 0.1), jnp.bfloat16)
    >>> params, state = convert(params, state, lowbit, optax.adamw(1e-3))
    >>> params
    Array([0.1, 0.1, 0.1], dtype=float32)
    >>> convert(params, state, optax.adamw(1e-3), lowbit, dtypes=jnp.bfloat16)[0]
    Array([0.100098, 0.100098, 0.100098], dtype=bfloat16)
    """
    source = decoded_run(from_tx, params, state)
    shapes = _new_shapes(source, params, to_tx, dtypes)
    names, leaves, treedef = trees.named_leaves(shapes)
    by_name = dict(zip(names, leaves, strict=True))
    nodes, around = jax.tree_util.tree_flatten_with_path(
        recorded_state(to_tx, shapes), is_recorded
    )
    targets = {
        i: _Target.of(node, by_name)
        for i, (_, node) in enumerate(nodes)
        if isinstance(node, Recorded)
    }
    wanted = [
        targets[i].plan.expected if i in targets else node
        for i, (_, node) in enumerate(nodes)
    ]
    _check_alike(source.state, around.unflatten(wanted))
    formats = {name: f for x in targets.values() for name, f in x.formats.items()}
    pairs = {
        name: _pair(source, name, leaf, formats.get(name))
        for name, leaf in by_name.items()
    }
    parts = around.flatten_up_to(source.state)
    new = [
        targets[i].state(jax.tree_util.keystr(path), part, pairs, source)
        if i in targets
        else _carried(jax.tree_util.keystr(path), path, part, node, source)
        for i, ((path, node), part) in enumerate(zip(nodes, parts, strict=True))
    ]
    return treedef.unflatten(pairs[name][0] for name in names), around.unflatten(new)


@dataclasses.dataclass(frozen=True, eq=False)
class _Target:
    """A ``lowbit`` of the new transformation.

    Args:
      recorded: what it was asked to make a state for.
      formats: of its parameters, by path; None for those that pass through.
      plan: of its moments.
    """

    recorded: Recorded
    formats: dict[str, WeightFormat | None]
    plan: MomentPlan

    @staticmethod
    def of(recorded: Recorded, by_name: dict[str, typing.Any]) -> "_Target":
        leaves = recorded.leaves("to_tx", by_name)
        plan = recorded.plan(leaves)
        recorded.config.check_start(leaves, plan.expected)
        return _Target(recorded, {x.name: x.format for x in leaves}, plan)

    def state(self, where: str, inner_state, pairs, source: DecodedRun) -> LowbitState:
        """Its state.

        Args:
          where: its path, for errors.
          inner_state: the inner state, of Parts.
          pairs: (param, residual) of every parameter, by path.
          source: the run that is converted.
        """
        config, names = self.recorded.config, self.recorded.names
        expected, treedef = jax.tree_util.tree_flatten_with_path(self.plan.expected)
        parts, kept = [], set()
        for i, ((path, want), part, formats) in enumerate(
            zip(
                expected,
                treedef.flatten_up_to(inner_state),
                formats_of_parts(self.plan),
                strict=True,
            )
        ):
            inner = f"{where}.inner_state{jax.tree_util.keystr(path)}"
            value = _carried(inner, path, part, want, source)
            if formats[0] is not None and formats == part.formats:
                value = part.stored
                kept.add(i)
            parts.append(value)
        encoded = self.plan.encode(parts, dict.fromkeys(names, DrawsToNearest()), kept)
        residuals = [pairs[name][1] for name in names]
        counts = [source.held[name].count for name in names if name in source.held]
        return LowbitState(
            counts[0] if counts else jnp.zeros([], jnp.uint32),
            jnp.asarray(config.seed, jnp.uint32),
            config.in_container(self.recorded.treedef.unflatten(residuals)),
            self.plan.tree(treedef, encoded),
        )


def _pair(source: DecodedRun, name: str, like, format_: WeightFormat | None):
    """The new parameter of a leaf, and its residual in a weight format."""
    param, held = source.params[name], source.held.get(name)
    if trees.is_quantized(like):
        if _static(param) == _static(like):
            return param, None
        x = source.master(name)
        return quantize(like.bits, like.block_size, like.axis, x, None), None
    had, residual = (None, None) if held is None else (held.format, held.residual)
    is_kept = not trees.is_quantized(param) and param.dtype == like.dtype
    if is_kept and had == format_:
        return param, residual
    master = source.master(name)
    if format_ is None:
        return narrow_or_cast(master, like.dtype), None
    param = format_.round(master, like.dtype, ToNearest())
    return param, format_.residual(master, param, ToNearest())


def _static(leaf):
    """What two QuantizedTensors of one layout have in common; None for an array."""
    if not trees.is_quantized(leaf):
        return None
    return leaf.shape, leaf.bits, leaf.block_size, leaf.axis


def _carried(where: str, path, part: Part, want, source: DecodedRun) -> typing.Any:
    """An array of the state in the dtype that the new transformation keeps."""
    value = part.value
    if isinstance(value, int | float):  # a hyperparameter set by hand
        return jnp.asarray(value, want.dtype)
    if value.shape == want.shape:
        # The first step makes floats of what optax keeps of integers and booleans.
        if value.dtype == want.dtype or _is_of_no_float(path, source.params):
            return value
        if trees.is_float(value) and trees.is_float(want):
            return narrow_or_cast(value, want.dtype)
    raise ValueError(
        f"convert: state{where} is {trees.describe(want)} in to_tx, but "
        f"{trees.describe(value)} in from_tx; accepted are transformations that keep "
        "the same arrays"
    )


def _is_of_no_float(path, params: dict[str, typing.Any]) -> bool:
    """Whether a path in a state ends with that of a parameter that is no float."""
    tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path) + 1))
    owner = next((name for name in tails if name in params), None)
    return owner is not None and not trees.is_float(params[owner])


def _check_alike(given, wanted) -> None:
    """Raise unless two states have one structure, once lowbit's own is out of them."""
    if jax.tree.structure(given) == jax.tree.structure(wanted):
        return
    paths = [
        [jax.tree_util.keystr(x) for x, _ in jax.tree_util.tree_flatten_with_path(t)[0]]
        for t in (given, wanted)
    ]
    differ = next((x for x in itertools.zip_longest(*paths) if x[0] != x[1]), None)
    if differ is None:
        where = f"{jax.tree.structure(given)} and {jax.tree.structure(wanted)}"
    else:
        there, here = ("nothing" if x is None else f"state{x}" for x in differ)
        where = f"where from_tx has {there}, to_tx has {here}"
    raise ValueError(
        f"convert: in float32 the two transformations keep different states: {where}. "
        "Accepted are a from_tx and a to_tx with the same inner transformation and "
        "wrappers, such as kahan_adamw, lowbit_adamw and optax.adamw. To change the "
        "optimizer, take master_weights and from_master"
    )


def _new_shapes(source: DecodedRun, params, to_tx, dtypes):
    """The parameters to be made: a tree of shapes, and QuantizedTensors of shapes."""
    names, leaves, treedef = trees.named_leaves(params)
    if dtypes is None:
        logical = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        held = _names_held_by(to_tx, treedef.unflatten(logical))
        # What plain optax would otherwise train without its low bits.
        loses = {
            name
            for name, own in source.held.items()
            if own.format is not None and name not in held
        }
        kinds = [
            np.dtype(np.float32) if name in loses else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
    else:
        kinds = of_leaves("convert", dtypes, "params", params)
    return treedef.unflatten(
        _shape(name, leaf, kind)
        for name, leaf, kind in zip(names, leaves, kinds, strict=True)
    )


def _names_held_by(tx, params) -> set[str]:
    nodes = jax.tree.leaves(recorded_state(tx, params), is_leaf=is_recorded)
    return {name for x in nodes if isinstance(x, Recorded) for name in x.names}


def _shape(name: str, leaf, kind):
    """The new leaf's shape, of a dtype or like an array or QuantizedTensor."""
    if not trees.is_float(leaf):
        return trees.abstract(leaf)
    is_array = hasattr(kind, "shape") and not isinstance(kind, np.dtype | type)
    if is_array and tuple(kind.shape) != tuple(leaf.shape):
        raise ValueError(
            f"convert: params{name} has shape {list(leaf.shape)}, but dtypes has "
            f"{list(kind.shape)} there"
        )
    if trees.is_quantized(kind):
        trees.check_quantized(name, kind)
        return trees.abstract(kind)
    try:
        given = getattr(kind, "dtype", None) if is_array else kind
        dtype = float_dtype("convert: dtypes", given)
    except TypeError as error:
        raise TypeError(
            f"convert: dtypes has {kind!r} for params{name}; accepted are "
            "floating-point dtypes such as bfloat16, arrays, and QuantizedTensors"
        ) from error
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
