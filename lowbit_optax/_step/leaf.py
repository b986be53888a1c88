"""``StoredLeaf``: one parameter in its stored form, with its residual and gradient.

:meth:`.engine.Lowbit.open` creates a stored leaf for each parameter, and checks that
dtype, gradient and residual match. The engine calls ``master`` and ``wide_grad`` for
the inner update, and ``landed`` to store the result.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lowbit_optax._arguments import brief
from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax._step import trees
from lowbit_optax._step.context import layerwise
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD, blank, is_blank
from lowbit_optax._step.trees import STATIC
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled import BlockScaledTensor, for_tensor
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from pallas_kernels.fused_update import shards
from pallas_kernels.fused_update.shards import axes_of
from pallas_kernels.layout import layout_of


class Landed(typing.NamedTuple):
    """A leaf after its inner update was added to the master.

    Args:
      result: the new parameter, or the update.
      residual: the new residual.
      error: the rounding error of the stored master; None unless the format needs it.
    """

    result: typing.Any
    residual: typing.Any = None
    error: typing.Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A parameter as it is stored between two steps, and its gradient.

    Args:
      name: the path.
      param: the parameter.
      format: its weight format; None if the parameter is its own master.
      residual: the stored residual, or None.
      grad: the gradient that the user passed; None outside of a step.
      spec_before: the user's PartitionSpec if :func:`on_whole_units` or
        :func:`beside_state` moved the parameter, otherwise None.
      sharding: the sharding that the user passed as ``param_shardings``, or None.
    """

    name: str = dataclasses.field(metadata=STATIC)
    param: typing.Any
    format: WeightFormat | None = dataclasses.field(metadata=STATIC)
    residual: typing.Any = None
    grad: typing.Any = None
    spec_before: PartitionSpec | None = dataclasses.field(default=None, metadata=STATIC)
    sharding: NamedSharding | None = dataclasses.field(default=None, metadata=STATIC)

    def with_residual(self, residual) -> "StoredLeaf":
        """Check a residual from a state, and return the leaf with it.

        The leaf contains None instead of a blank.
        """
        name, dtype = f"params{self.name}", self.param.dtype
        if self.format is None:
            if is_blank(residual, NOT_HELD):
                return self
            raise ValueError(
                f"lowbit: {name} must have the narrower dtype that tx.init received, "
                f"got {dtype}; the state contains the residual "
                f"{trees.describe(residual)}. The parameter may have been cast by "
                "equinox.apply_updates, which adds float32 updates. Use "
                "lowbit_optax.apply_updates, optax.apply_updates or lowbit_optax.step "
                "instead"
            )
        want = _residual_like(self.format, trees.abstract(self.param))
        if want is None and is_blank(residual, NO_RESIDUAL):
            return self
        if is_blank(residual, NOT_HELD):
            raise ValueError(
                f"lowbit: {name} must be float32 like the parameters in tx.init, got "
                f"{dtype}; the state has no residual for it. To start from float32 "
                "parameters, call lowbit_optax.from_master(tx, params, "
                f"{dtype.name!r}), which casts them and stores their low bits in the "
                "state"
            )
        if trees.describe(residual) != trees.describe(want):
            raise ValueError(
                f"lowbit: residual of {name} must be {trees.describe(want)} for "
                f"{self.format}, got {trees.describe(residual)}. {trees.OTHER_STATE}"
            )
        return dataclasses.replace(self, residual=residual)

    def blank(self):
        """Return the array that replaces a missing residual in the state."""
        return blank(self.param, NOT_HELD if self.format is None else NO_RESIDUAL)

    def with_grad(self, grad) -> "StoredLeaf":
        """Check a gradient, and return the leaf with it.

        The gradient of a float parameter must be a float array of the same shape. Zeros
        replace any gradient of integers, booleans and PRNG keys.
        """
        what = f"lowbit: gradient of params{self.name}"
        if trees.is_quantized(grad):
            raise TypeError(
                f"{what} must be an array of shape {self.param.shape}, got a "
                f"{type(grad).__name__}. lowbit_optax.lpmm.value_and_grad returns such "
                "arrays"
            )
        if not hasattr(grad, "dtype"):
            raise TypeError(f"{what} must be an array, got {brief(grad)}")
        if not trees.is_inexact(self.param):
            grad = jnp.zeros_like(_numbers(self.param), jnp.float32)
            return dataclasses.replace(self, grad=grad)
        is_real = trees.is_float(self.param)
        if not (trees.is_float if is_real else trees.is_inexact)(grad):
            kind = "real" if is_real else "real or complex"
            raise TypeError(
                f"{what} must have a {kind} floating-point dtype, got {grad.dtype}"
            )
        if grad.shape != self.param.shape:
            raise ValueError(
                f"{what} must have the parameter's shape {self.param.shape}, got "
                f"{grad.shape}"
            )
        if is_real and self.param.dtype.itemsize <= 4 < grad.dtype.itemsize:
            grad = grad.astype(jnp.float32)
        return dataclasses.replace(self, grad=self.moved_like_param(grad))

    def moved_like_param(self, x):
        """Move an array of the parameter's shape to the parameter's sharding."""
        if self.spec_before is None:
            return x
        return shards.placed_like(x, jax.tree.leaves(self.param)[0])

    def moved_back(self, x):
        """Move an array to the sharding that the user's parameter had."""
        spec = self.spec_before
        if spec is None:
            return x
        mesh = jax.typeof(jax.tree.leaves(self.param)[0]).sharding.mesh
        return jax.tree.map(lambda array: shards.moved([array], [spec], mesh)[0], x)

    def master(self):
        """Return the weight that the inner transformation sees."""
        if self.format is None:
            return _numbers(self.param)
        join = functools.partial(_inner_weight, self.format)
        return layerwise(join)(self.param, self.residual)

    def wide_grad(self):
        """Return the gradient, in float32 if it or its parameter is narrower."""
        return self.grad.astype(jnp.float32) if self.has_narrow_grad else self.grad

    @property
    def has_narrow_grad(self) -> bool:
        """Whether the gradient or its parameter is narrower than float32."""
        is_few_bits = lambda x: trees.is_quantized(x) or is_narrow(x.dtype)
        is_float = trees.is_float(self.param)
        return is_float and (is_few_bits(self.param) or is_few_bits(self.grad))

    @property
    def spare_stream(self) -> int | None:
        """The index of the random stream with spare bits for moments, or None."""
        return self.format and self.format.spare_stream(self.param.dtype)

    def landed(
        self, update, random: RandomBits, landing: Landing, ahead=None
    ) -> Landed:
        """Add the inner update to the master, and store it.

        For ``ahead``, see :meth:`WeightFormat.advance`.
        """
        if not trees.is_inexact(self.param):
            still = jnp.zeros_like(_numbers(self.param))
            return Landed(self.param if landing.is_direct else still)
        if self.format is None:
            if landing.is_direct:
                update = optax.apply_updates(self.param, update)
            return Landed(update)
        landing = landing.of(self.param, self.grad)
        advance = lambda *arrays: advanced(self.format, landing, *arrays, random)
        update = update.astype(jnp.float32)
        return layerwise(advance)(self.param, self.residual, update, ahead)


def _numbers(param):
    """Return zeros instead of PRNG keys, which do not support arithmetic."""
    is_keys = jnp.issubdtype(param.dtype, jax.dtypes.prng_key)
    return jnp.zeros(param.shape, jnp.uint32) if is_keys else param


@functools.partial(jax.jit, static_argnums=0)
def widen(format_: WeightFormat, param):
    """Return the parameter as a master. Traced once per format and shape."""
    return straight_through(format_.widen)(param)


@functools.partial(jax.jit, static_argnums=0)
def _inner_weight(format_: WeightFormat, param, residual):
    return straight_through(format_.inner_weight)(param, residual)


@functools.partial(jax.jit, static_argnums=(0, 1))
def advanced(
    format_: WeightFormat, landing: Landing, param, residual, update, ahead, random
) -> Landed:
    """Run ``advance`` of the format. Traced once per format and shape."""

    def advance(param, residual, update, ahead, random):
        new, after, result = format_.advance(
            param, residual, update, random, landing, ahead
        )
        if format_.error_feedback is None:
            return Landed(result, after)
        error = format_.error(param, residual, update, new, after)
        return Landed(result, after, error)

    def tangent(param, residual, update, *_):
        return param.astype(update.dtype) + update if landing.is_direct else update

    run = straight_through(advance, tangent)
    return run(param, residual, update, ahead, random)


def format_of(
    weights: WeightFormat, min_size: int, name: str, leaf
) -> WeightFormat | None:
    """Return the weight format of a leaf, or None for float32 and integer leaves."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"lowbit: params{name} must be an array, got {brief(leaf)}")
    min_size = min_size_of_shard(min_size, leaf)
    if trees.is_quantized(leaf):
        with trees.naming(name):
            leaf.check()
            if isinstance(leaf, BlockScaledTensor):
                return for_tensor(weights, leaf, min_size)
        is_chosen = isinstance(weights, QuantizedWeights)
        into = weights.error_feedback
        return weights if is_chosen else QuantizedWeights(error_feedback=into)
    if not trees.is_float(leaf):
        return None
    if not is_narrow(leaf.dtype):
        if leaf.dtype.itemsize < 4:
            raise ValueError(
                f"lowbit: params{name} must be {', '.join(map(str, NARROW_DTYPES))} or "
                f"float32, got {leaf.dtype}"
            )
        return None
    why_not = weights.check(leaf.dtype)
    if why_not:
        raise ValueError(f"lowbit: params{name}: {why_not}")
    with trees.naming(name):
        return weights.for_leaf(leaf.shape, leaf.dtype, min_size)


@functools.lru_cache(maxsize=4096)
def _residual_like(format_: WeightFormat, param):
    return jax.eval_shape(format_.init, param)


def on_whole_units(
    leaf: StoredLeaf, bits: tuple[int, ...], block_size: int | None
) -> StoredLeaf:
    """Move a parameter so that its shards are whole words and blocks.

    On automatic axes, XLA itself moves words and blocks that a shard would cut. On
    explicit axes, this function shards another axis of the leaf instead, and the result
    of the step is moved back.

    Args:
      leaf: the leaf that the user passed.
      bits: widths of all packed fields, in bits.
      block_size: size of the largest blocks; None if there are none.

    Raises:
      ValueError: if no other axis can be sharded. The message contains the path.
    """
    param = leaf.param
    if not isinstance(param, jax.Array) or not (bits or block_size) or not param.shape:
        return leaf
    sharding, layout = jax.typeof(param).sharding, layout_of(param.shape)
    if not any(axes_of(sharding.spec, param.ndim)):
        return leaf
    unit = lambda axis: layout.unit(axis, bits, block_size)
    spec = shards.on_whole_units(sharding.spec, param.shape, sharding.mesh, unit)
    before, after = (axes_of(x, param.ndim) for x in (sharding.spec, spec))
    if before == after:
        return leaf
    if sorted(before) == sorted(after):
        (moved,) = shards.moved([param], [spec], sharding.mesh)
        return dataclasses.replace(leaf, param=moved, spec_before=sharding.spec)
    axis = next(i for i, names in enumerate(before) if names and names != after[i])
    count = shards.count_of(sharding.mesh, before[axis])
    packed = " and ".join(f"{width}-bit fields" for width in bits)
    if block_size is not None:
        packed += f" in blocks of {block_size}"
    raise ValueError(
        f"lowbit: params{leaf.name}, {trees.describe(param)}, has shards of "
        f"{param.shape[axis] // count} along axis {axis} on explicit axes "
        f"{sharding.spec}, but shards must be multiples of {unit(axis)} for {packed}. "
        "Shard it over fewer devices, shard another axis that divides into such "
        "multiples, use a mesh with automatic axes, or pass a larger min_size to "
        "lowbit"
    )


def beside_state(leaves: Sequence[StoredLeaf], state) -> list[StoredLeaf]:
    """Move parameters on explicit axes to the shards of their state.

    A state may be sharded over more devices than its parameter (ZeRO-1). Each device
    then updates the part whose state it stores, and the result of the step is moved
    back. On automatic axes, :mod:`pallas_kernels.fused_update.shards` does the same.
    """
    arrays = jax.tree.leaves([leaf.param for leaf in leaves])
    if not any(map(shards.is_on_explicit_axes, arrays)):
        return list(leaves)
    owned: dict[str, list] = {leaf.name: [] for leaf in leaves}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        path = jax.tree_util.keystr(path)
        owner = max(filter(path.endswith, owned), key=len, default=None)
        if owner is not None:
            owned[owner].append(x)
    return [_beside(leaf, owned[leaf.name]) for leaf in leaves]


def _beside(leaf: StoredLeaf, state: Sequence) -> StoredLeaf:
    arrays, treedef = jax.tree.flatten(leaf.param)
    moved = [shards.placed_beside(x, state) for x in arrays]
    if all(map(operator.is_, arrays, moved)):
        return leaf
    spec = jax.typeof(arrays[0]).sharding.spec
    return dataclasses.replace(
        leaf,
        param=treedef.unflatten(moved),
        spec_before=spec if leaf.spec_before is None else leaf.spec_before,
    )


def axes_of_shards(leaf) -> tuple[str, ...]:
    """Return the axes of the user's ``jax.shard_map`` along which shards differ.

    The types of the arrays list these axes, except with ``check_vma=False``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = [x for x in jax.tree.leaves(leaf) if isinstance(x, jax.Array)]
    varying = {name for x in arrays for name in jax.typeof(x).manual_axis_type.varying}
    return tuple(n for n in mesh.manual_axes if n in varying and mesh.shape[n] > 1)


def min_size_of_shard(min_size: int, leaf) -> int:
    """Return the size of a shard of a leaf with ``min_size`` elements.

    In the user's ``jax.shard_map``, the shapes of leaves are the shapes of shards.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return -(-min_size // math.prod(mesh.shape[n] for n in axes_of_shards(leaf)))


def number_of_shard(axes: tuple[str, ...]) -> jax.Array:
    """Return the index of this shard along these axes, as a uint32 scalar."""
    return lax.axis_index(axes).astype(jnp.uint32)
