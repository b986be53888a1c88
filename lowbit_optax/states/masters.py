"""Convert between float32 master weights and the parameters and state of a run."""

import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from lowbit_optax._arguments import brief, check_transformation
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.dtypes import dtype_of
from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, is_narrow
from lowbit_optax._numerics.random_bits import ToNearest
from lowbit_optax._numerics.straight_through import narrowed, straight_through, widened
from lowbit_optax._step import context, trees
from lowbit_optax._step.float32_params import (
    KeepFloat32,
    dtypes_of,
    is_bias_or_norm,
    narrowed_dtypes,
)
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD, LowbitState, is_blank
from lowbit_optax._step.stepper import with_extra_args
from lowbit_optax._types import OptState, Params, PyTree, Transformation
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled import BlockScaledTensor, BlockScaledWeights
from lowbit_optax.formats.leaves import format_named, join_leaf
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from lowbit_optax.states.decoded import Recorded, check_one_state_each, recorded_nodes
from lowbit_optax.states.host_memory import on_device


def master_weights(params: Params, state: OptState) -> Params:
    """Return the float32 weights of a run, for evaluation or export.

        master = join(param, residual)

    Args:
      params: tree of parameters.
      state: the optimizer state for these parameters. It may contain the state of
        :func:`lowbit_optax.lowbit` anywhere, such as in a chain, a partition or
        MultiSteps.

    Returns:
      A tree like ``params``: float32 for weights in a weight format and for quantized
      weights, and unchanged for other leaves.

    Raises:
      ValueError: if ``state`` contains no lowbit state although a parameter is narrower
        than float32, a state for other parameters, or two states for a parameter, for
        example of an optimizer and an average.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> params = jnp.ones(3, jnp.bfloat16)
    >>> tx = lowbit_optax.kahan_sgd(1.0)
    >>> grads = jnp.full(3, 2.0**-12)
    >>> params, state = lowbit_optax.step(tx, params, tx.init(params), grads)
    >>> params, master_weights(params, state)
    (Array([1, 1, 1], dtype=bfloat16),
     Array([0.99975586, 0.99975586, 0.99975586], dtype=float32))
    """
    names, leaves, treedef = trees.named_leaves(params)
    residuals = _residuals(dict(zip(names, leaves, strict=True)), state)
    masters = []
    for name, leaf in zip(names, leaves, strict=True):
        if name in residuals:
            format_, residual = residuals[name]
            residual = jax.tree.map(on_device, residual)
            leaf = traced_once(join_leaf, format_)(leaf, residual)
        elif trees.is_quantized(leaf):
            with trees.naming(name):
                leaf = leaf.dequantize()
        elif trees.is_narrow_array(leaf):
            leaf = traced_once(widened)(leaf)
        masters.append(leaf)
    return treedef.unflatten(masters)


def from_master(
    tx: Transformation,
    params: Params,
    dtype: typing.Any = None,
    keep_float32: KeepFloat32 = is_bias_or_norm,
) -> tuple[Params, OptState]:
    """Start training from float32 weights, and keep their low bits in the state.

        (param, residual) = split(master)

    Float32 matrices become bfloat16 when a weight format starts to store them, unless
    you pass another dtype. The same rule applies to :func:`convert`,
    ``training.TrainState.create`` and ``training.nnx_optimizer``.

    Args:
      tx: an optax transformation. With plain optax, weights stay float32.
      params: tree of float32 weights, as ``model.init`` returns them.
      dtype: the dtype of all parameters except those that ``keep_float32`` selects. If
        None, the rule above determines the dtypes. It may be a tree of dtypes that is a
        prefix of ``params``. In a tree, quantized weights, such as ``jax.eval_shape``
        of :func:`block_scale` returns, select weights of this kind. Leaves that are not
        floating-point keep their dtype.
      keep_float32: function of a leaf's path, such as ``"['dense']['bias']"``, and the
        leaf, which returns True if the leaf keeps its dtype. The default keeps biases,
        vectors and normalizations. None keeps no leaf. It has no effect if ``dtype`` is
        a tree.

    Returns:
      ``(params, state)``: parameters in the new dtypes, and the state of ``tx`` for
      them, whose residuals store the bits that rounding removed.

    Raises:
      ValueError: if the weight format does not support the dtype of a leaf, if a weight
        is too large for its new dtype, or if ``dtype`` is narrower than the weights and
        ``tx`` has no weight format to keep their low bits.
      TypeError: if ``tx`` is not a transformation, if a leaf is not an array, or if
        ``dtype`` is not a floating-point dtype.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx = lowbit_optax.extra_bits_sgd(0.1)
    >>> params = {"kernel": jnp.full((1, 2), 0.1), "bias": jnp.ones(2)}
    >>> params, state = from_master(tx, params)
    >>> params
    {'bias': Array([1., 1.], dtype=float32),
     'kernel': Array([[0.100098, 0.100098]], dtype=bfloat16)}
    >>> master_weights(params, state)["kernel"]
    Array([[0.1, 0.1]], dtype=float32)
    """
    check_transformation("from_master", "tx", tx)
    names, masters, treedef = trees.named_leaves(params)
    dtypes = dtypes_under(tx, "from_master: dtype", params, dtype, keep_float32)
    kinds = trees.leaves_of_prefix("from_master: dtype", dtypes, params)
    leaves = list(map(_rounded, names, masters, kinds))
    is_few_bits = lambda x: trees.is_narrow_array(x) or trees.is_quantized(x)
    rounded = {
        name: x
        for name, x, leaf in zip(names, masters, leaves, strict=True)
        if is_few_bits(leaf) and trees.abstract(x) != trees.abstract(leaf)
    }
    formats = _formats(tx, names, leaves, treedef, rounded)
    wide = {
        name: x.dequantize() if trees.is_quantized(x) else widened(x)
        for name, x in rounded.items()
        if name in formats
    }
    # Use the rounding of the format: some formats with unsigned residuals need
    # parameters that are rounded toward zero.
    new = treedef.unflatten(
        traced_once(_narrowed, formats[name], leaf.dtype)(wide[name])
        if name in wide
        else leaf
        for name, leaf in zip(names, leaves, strict=True)
    )
    with context.changed(start=lambda config, params: config.start(params, wide)):
        return new, tx.init(new)


def with_master(
    tx: optax.GradientTransformation, master: PyTree
) -> optax.GradientTransformation:
    """Return a transformation whose ``init`` keeps the low bits of float32 weights.

    Use it for trainers that call ``tx.init`` themselves, on narrow parameters::

        params, _ = lowbit_optax.from_master(tx, master)
        trainer = Trainer(params, lowbit_optax.with_master(tx, master))

    After the first ``init`` of arrays, the transformation releases ``master``. Later
    calls of ``init`` with shapes or under ``jax.jit`` call ``tx.init``.

    Args:
      tx: a transformation of this package, possibly inside optax's wrappers.
      master: tree of float32 weights, with the same leaves as the parameters, in the
        same order.

    Returns:
      ``tx`` with another ``init``.

    Raises:
      ValueError: from ``init``, if the parameters do not match ``master``, or if it was
        called with arrays before.
      TypeError: if ``tx`` is not a transformation, or if a leaf of ``master`` is not an
        array.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> tx, master = lowbit_optax.extra_bits_sgd(0.1), {"w": jnp.float32(0.1)}
    >>> params, _ = lowbit_optax.from_master(tx, master, jnp.bfloat16)
    >>> state = with_master(tx, master).init(params)
    >>> master_weights(params, state)["w"]
    Array(0.1, dtype=float32)
    """
    check_transformation("with_master", "tx", tx)
    names, masters, _ = trees.named_leaves(master)
    for name, x in zip(names, masters, strict=True):
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise TypeError(
                f"with_master: master{name} must be an array, got {brief(x)}"
            )
    held = [masters]

    def init(params: PyTree):
        names, leaves, _ = trees.named_leaves(params)
        are_arrays = all(map(_is_concrete, leaves))
        if names and are_arrays and not held:
            raise ValueError(
                "with_master: init must be called once with arrays, because it then "
                "releases the float32 weights; call with_master again"
            )
        is_asked_otherwise = context.current().start is not None
        if is_asked_otherwise or not names or not held:
            return tx.init(params)
        wide = _masters_of(names, leaves, held[0])
        with context.changed(start=lambda config, params: config.start(params, wide)):
            state = tx.init(params)
        if are_arrays:
            held.clear()
        return state

    # An optax.MultiSteps is not a tuple of functions.
    tx = tx if isinstance(tx, tuple) else with_extra_args(tx)
    return tx._replace(init=init)


def dtypes_under(tx, what: str, params, dtype, keep_float32: KeepFloat32, stored=None):
    """Return the dtypes of parameters under a transformation, or of a prefix of them.

    Args:
      tx: the transformation.
      what: the name of ``dtype``, for errors.
      params: tree of arrays or ShapeDtypeStructs.
      dtype: the new dtype, a tree of dtypes, or None: float32 leaves become bfloat16
        when a weight format starts to store them, weights in a format become float32
        when ``tx`` has none for them, and other leaves keep their dtype.
      keep_float32: see :data:`KeepFloat32`.
      stored: a dict from the paths of leaves that were stored before to StoredLeaf.
    """
    if dtype is not None:
        return dtypes_of(what, params, dtype, keep_float32)
    dtypes = narrowed_dtypes(what, params, jnp.bfloat16, keep_float32)
    names, leaves, treedef = trees.named_leaves(params)
    logical = treedef.unflatten(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    nodes = [x for _, x in recorded_nodes(tx, logical)[0] if isinstance(x, Recorded)]
    configs = {name: x.config for x in nodes for name in x.names}
    stored = stored or {}

    def choose(name: str, leaf, dtype):
        config, kept = (
            configs.get(name),
            leaf if trees.is_quantized(leaf) else leaf.dtype,
        )
        if config is None:
            # Plain optax would train these weights without their low bits.
            return jnp.float32 if name in stored and stored[name].format else kept
        # With this format, small leaves would lose updates in bfloat16, and large
        # leaves raise an error.
        is_quantized = isinstance(config.weights, QuantizedWeights)
        is_kept = name in stored or leaf.dtype == dtype or is_narrow(leaf.dtype)
        is_kept = is_kept or (is_quantized and leaf.size < config.min_size)
        return kept if is_kept else dtype

    dtypes = treedef.flatten_up_to(dtypes)
    return treedef.unflatten(map(choose, names, leaves, dtypes))


def _masters_of(names, leaves, masters) -> dict[str, typing.Any]:
    """Return a dict from the path of each float parameter to its float32 weight."""
    for name, leaf, master in itertools.zip_longest(names, leaves, masters):
        if leaf is None or master is None or leaf.shape != master.shape:
            raise ValueError(
                "with_master: master must have the same leaves as params in the same "
                f"order, but params{name or ''} is {trees.describe(leaf)} and master "
                f"has {trees.describe(master)}"
            )
    pairs = zip(names, masters, strict=True)
    return {name: widened(x) for name, x in pairs if trees.is_float(x)}


def _is_concrete(leaf) -> bool:
    arrays = jax.tree.leaves(leaf)
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
    return all(is_array(x) and not isinstance(x, Tracer) for x in arrays)


def _formats(tx, names, leaves, treedef, rounded) -> dict[str, WeightFormat]:
    """Return a dict from the path to the format of each leaf of a ``lowbit``.

    A ValueError is raised if there are ``rounded`` leaves and no weight format.
    """
    nodes, _ = recorded_nodes(tx, treedef.unflatten(leaves))
    nodes = [node for _, node in nodes if isinstance(node, Recorded)]
    if rounded and not nodes:
        raise ValueError(
            "from_master: tx must be a transformation of this package, such as "
            "lowbit(optax.adamw(1e-3)), because others would lose the bits that the "
            f"dtype of params{next(iter(rounded))} removes; or leave out dtype"
        )
    by_name = dict(zip(names, leaves, strict=True))
    formats = {}
    for node in nodes:
        has_residuals = node.config.weights.residual_name is not None
        # Without residuals, no bits are lost if a wrapper flattens the parameters.
        if has_residuals or all(name in by_name for name in node.names):
            for leaf in node.leaves("tx", by_name):
                is_stored = isinstance(leaf.format, QuantizedWeights)
                if leaf.format is not None and not is_stored:
                    formats[leaf.name] = leaf.format
    return formats


def _narrowed(format_: WeightFormat, dtype: np.dtype, master: jax.Array) -> jax.Array:
    narrow = lambda x: format_.round(x, dtype, ToNearest())
    is_tensor = isinstance(format_, BlockScaledWeights)
    return narrow(master) if is_tensor else straight_through(narrow)(master)


def _rounded(name: str, x, kind) -> jax.Array:
    """Return a float leaf in the dtype ``kind``, and other leaves unchanged."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"from_master: params{name} must be an array, got {brief(x)}")
    if trees.is_quantized(x) or not trees.is_float(x):
        return x
    if trees.is_quantized(kind):
        if tuple(kind.shape) != tuple(x.shape):
            raise ValueError(
                f"from_master: dtype for params{name}, {trees.describe(x)}, must have "
                f"the same shape, got {trees.describe(kind)}"
            )
        return kind.quantized(widened(x))
    dtype = dtype_of(f"from_master: dtype for params{name}", kind)
    if not is_narrow(dtype) and dtype not in (np.float32, np.float64):
        raise ValueError(
            f"from_master: dtype for params{name}, {trees.describe(x)}, must be one of "
            f"{', '.join(map(str, NARROW_DTYPES))} and float32, got {dtype}"
        )
    check_range(f"from_master: params{name}", x, dtype)
    return traced_once(narrowed, dtype)(x)


def check_range(what: str, x, dtype: np.dtype) -> None:
    """Raise a ValueError if a finite number of a concrete array overflows in a dtype.

    The message begins with ``what``.
    """
    if not is_narrow(dtype) or not _is_concrete(x):
        return
    with jax.ensure_compile_time_eval():  # a traced function may close over x
        if not traced_once(_overflows, dtype)(x):
            return
        largest = float(jnp.max(jnp.abs(x), initial=0, where=jnp.isfinite(x)))
    raise ValueError(
        f"{what} must have no magnitudes above {float(jnp.finfo(dtype).max):.6g} "
        f"in {dtype}, got {largest:.6g}; pass bfloat16, or keep it in float32"
    )


def _overflows(dtype: np.dtype, x: jax.Array) -> jax.Array:
    return jnp.any(jnp.isfinite(x) & ~jnp.isfinite(narrowed(dtype, x)))


def _residuals(
    params: dict[str, typing.Any], state
) -> dict[str, tuple[WeightFormat, jax.Array]]:
    """Return a dict from path to format and residual, for leaves with a residual."""
    is_lowbit = lambda x: isinstance(x, LowbitState)
    with_path = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_lowbit)
    kept = [(path, x.residual) for path, x in with_path if is_lowbit(x)]
    narrow = [name for name, x in params.items() if trees.is_narrow_array(x)]
    if narrow and not kept:
        raise ValueError(
            "master_weights: state must contain a LowbitState with the low bits of "
            f"params{narrow[0]}, {trees.describe(params[narrow[0]])}"
        )
    names_of = lambda x: filter(params.__contains__, trees.named_leaves(x.tree)[0])
    named = [(path, names_of(x)) for path, x in kept]
    check_one_state_each(named, "pass the state of the optimizer alone")
    found = {}
    for _, own in kept:
        for name, residual in trees.by_path(own.tree).items():
            if is_blank(residual, NOT_HELD) or is_blank(residual, NO_RESIDUAL):
                continue
            if name not in params:
                raise ValueError(
                    "master_weights: params and state must have the same paths, but "
                    f"only the state has params{name}; pass the tree that you passed "
                    "to tx.init, such as nnx.state(model, nnx.Param) of an nnx model"
                )
            param = params[name]
            is_held = trees.is_narrow_array(param) or type(param) is BlockScaledTensor
            format_ = format_named(own.name, param, residual) if is_held else None
            want = format_ and jax.eval_shape(format_.init, trees.abstract(param))
            if format_ is None or trees.describe(residual) != trees.describe(want):
                raise ValueError(
                    f"master_weights: the residual of params{name} must match "
                    f"{trees.describe(param)}, got {trees.describe(residual)}; pass "
                    "params and state of the same step"
                )
            found[name] = format_, residual
    return found
