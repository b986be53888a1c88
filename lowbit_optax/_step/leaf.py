"""One leaf of the parameters, as it is stored, and the checks of what belongs to it."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax._step import trees
from lowbit_optax._step.blanks import NO_RESIDUAL, NOT_HELD, blank, is_blank
from lowbit_optax._step.context import layerwise
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.block_scaled_tensor import BlockScaledTensor
from lowbit_optax.formats.block_scaled_weights import for_tensor
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from pallas_kernels import shards
from pallas_kernels.layout import layout_of
from pallas_kernels.shards import axes_of


class Landed(typing.NamedTuple):
    """A leaf to whose master the inner update is added.

    Args:
      result: the new parameter, or the update.
      residual: the new residual.
      error: what storing the master has lost; None if its format does not ask for it.
    """

    result: typing.Any
    residual: typing.Any = None
    error: typing.Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A leaf between two steps, and its gradient.

    Args:
      name: its path.
      param: the parameter.
      format: its weight format; None for a leaf that passes through.
      residual: as the state holds it; None if there is none.
      grad: the gradient as the user gave it; None outside of a step.
      spec_before: where the user's parameter is, if this one was moved: see
        :func:`on_whole_units`.
      sharding: where it lies on a mesh, if the user says so.
    """

    name: str
    param: typing.Any
    format: WeightFormat | None
    residual: typing.Any = None
    grad: typing.Any = None
    spec_before: PartitionSpec | None = None
    sharding: NamedSharding | None = None

    def with_residual(self, residual) -> "StoredLeaf":
        """The leaf with its residual, after checking that this belongs to it."""
        kept = check_residual(self.name, self.param, self.format, residual)
        return dataclasses.replace(self, residual=kept)

    def blank(self):
        """What the state has in the place of its residual if it has none."""
        return blank(self.param, NOT_HELD if self.format is None else NO_RESIDUAL)

    def with_grad(self, grad) -> "StoredLeaf":
        """The leaf with its gradient, after checking that this belongs to it."""
        check_grad(self.name, grad, self.param)
        return dataclasses.replace(self, grad=self.moved_like_param(grad))

    def moved_like_param(self, x):
        """An array of the parameter's shape, where the parameter was moved to."""
        return x if self.spec_before is None else shards.placed_like(x, self.param)

    def moved_back(self, x):
        """An array that lies as the parameter does, where the user's parameter is."""
        if self.spec_before is None:
            return x
        mesh = jax.typeof(self.param).sharding.mesh
        return shards.moved([x], [self.spec_before], mesh)[0]

    def master(self):
        """The weight that the inner transformation sees."""
        if self.format is None:
            return self.param
        join = functools.partial(_inner_weight, self.format)
        return layerwise(join)(self.param, self.residual)

    def wide_grad(self):
        """The gradient, as float32 if it or its parameter is narrower than that."""
        return self.grad.astype(jnp.float32) if self.has_narrow_grad else self.grad

    @property
    def has_narrow_grad(self) -> bool:
        """Whether the gradient or its parameter is narrower than float32."""
        is_few_bits = lambda x: trees.is_quantized(x) or is_narrow(x.dtype)
        is_float = trees.is_float(self.param)
        return is_float and (is_few_bits(self.param) or is_few_bits(self.grad))

    @property
    def spare_stream(self) -> int | None:
        """The stream whose spare random bits moments may use; None if there is none."""
        return self.format and self.format.spare_stream(self.param.dtype)

    def landed(
        self, update, random: RandomBits, landing: Landing, ahead=None
    ) -> Landed:
        """Add the inner update to the master and store it.

        ``ahead`` is as of :meth:`WeightFormat.advance`.
        """
        if self.format is None:
            if landing.is_direct:
                update = optax.apply_updates(self.param, update)
            return Landed(update)
        landing = landing.of(self.param, self.grad)
        advance = lambda *arrays: advanced(self.format, landing, *arrays, random)
        update = update.astype(jnp.float32)
        return layerwise(advance)(self.param, self.residual, update, ahead)


@functools.partial(jax.jit, static_argnums=0)
def widen(format_: WeightFormat, param):
    """The parameter as a master; traced once per format and shape."""
    return straight_through(format_.widen)(param)


@functools.partial(jax.jit, static_argnums=0)
def _inner_weight(format_: WeightFormat, param, residual):
    return straight_through(format_.inner_weight)(param, residual)


@functools.partial(jax.jit, static_argnums=(0, 1))
def advanced(
    format_: WeightFormat, landing: Landing, param, residual, update, ahead, random
) -> Landed:
    """The leaf after :meth:`WeightFormat.advance`; traced once per format and shape."""

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
    """The weight format of a leaf; None for one that passes through.

    Raises:
      TypeError, ValueError: naming a leaf that is not an array, or that the weight
        format cannot hold.
    """
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"lowbit: params{name} is {leaf!r}, not an array")
    if trees.is_quantized(leaf):
        with trees.naming(name):
            leaf.check()
            if isinstance(leaf, BlockScaledTensor):
                return for_tensor(weights, leaf, min_size)
        is_chosen = isinstance(weights, QuantizedWeights)
        return weights if is_chosen else QuantizedWeights()
    if not trees.is_float(leaf):
        return None
    if not is_narrow(leaf.dtype):
        if leaf.dtype.itemsize < 4:
            raise ValueError(
                f"lowbit: params{name} is {leaf.dtype}, which no weight format "
                f"holds; accepted are {', '.join(map(str, NARROW_DTYPES))}, and "
                "float32"
            )
        return None
    why_not = weights.check(leaf.dtype)
    if why_not:
        raise ValueError(f"lowbit: params{name}: {why_not}")
    with trees.naming(name):
        return weights.for_leaf(leaf.shape, leaf.dtype, min_size)


def check_grad(name: str, grad, param) -> None:
    """Raise unless a gradient is a float array of its parameter's shape."""
    if trees.is_quantized(grad):
        raise TypeError(
            f"lowbit: gradient of params{name} is a {type(grad).__name__}; accepted is "
            f"an array of shape {param.shape}, see lowbit_optax.lpmm.value_and_grad"
        )
    if not hasattr(grad, "dtype"):
        raise TypeError(f"lowbit: gradient of params{name} is {grad!r}, not an array")
    if not trees.is_float(param):
        return
    if not trees.is_float(grad):
        raise TypeError(
            f"lowbit: gradient of params{name} is {grad.dtype}; accepted are real "
            "floating-point dtypes"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"lowbit: gradient of params{name} has shape {grad.shape}; its parameter "
            f"has {param.shape}"
        )


def check_residual(name: str, param, format_: WeightFormat | None, part):
    """The residual of a leaf, None for a blank, once it is known to be its own.

    Raises:
      ValueError: naming the leaf.
    """
    if format_ is None:
        if is_blank(part, NOT_HELD):
            return None
        raise ValueError(
            f"lowbit: params{name} is {param.dtype}, but the state is that of a lower "
            f"precision, with the residual {trees.describe(part)}: was it cast "
            "on the way, as equinox.apply_updates does when it adds float32 "
            "updates? Apply updates by lowbit_optax.apply_updates or "
            "optax.apply_updates, or step by lowbit_optax.step"
        )
    want = _residual_like(format_, trees.abstract(param))
    if want is None and is_blank(part, NO_RESIDUAL):
        return None
    if is_blank(part, NOT_HELD):
        raise ValueError(
            f"lowbit: params{name} is {param.dtype}, but the state has no residual "
            "of it, as of a float32 parameter: was it cast after tx.init? Start "
            "from the float32 parameters by "
            f"lowbit_optax.from_master(tx, params, {param.dtype.name!r}), which "
            "casts them and keeps their low bits in the state"
        )
    if trees.describe(part) != trees.describe(want):
        raise ValueError(
            f"lowbit: residual of params{name} is {trees.describe(part)}, but "
            f"{format_ or 'a leaf that passes through'} keeps "
            f"{trees.describe(want)}: was this state made by a transformation with "
            "other weights?"
        )
    return part


@functools.lru_cache(maxsize=4096)
def _residual_like(format_: WeightFormat, param):
    return jax.eval_shape(format_.init, param)


def on_whole_units(
    leaf: StoredLeaf, bits: tuple[int, ...], block_size: int | None
) -> StoredLeaf:
    """The leaf with its parameter where shards are whole words and blocks.

    On automatic axes XLA moves what is cut. On explicit ones a mesh axis that would cut
    words or blocks spreads another axis of the leaf, and the step's result goes back to
    where the parameter was.

    Args:
      leaf: as the user gave it.
      bits: widths of all that is packed.
      block_size: of the largest blocks; None if there are none.

    Raises:
      ValueError: if no other axis divides, naming the leaf.
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
        f"params{leaf.name}, {trees.describe(param)} on explicit axes as "
        f"{sharding.spec}, has shards of {param.shape[axis] // count} along axis "
        f"{axis}; accepted are multiples of {unit(axis)}, for {packed}, or another "
        "axis that divides into them. Shard it over fewer devices, make the mesh's "
        "axes automatic, or give lowbit a larger min_size"
    )


def axes_of_shards(leaf) -> tuple[str, ...]:
    """The mesh axes of the user's ``jax.shard_map`` over which a leaf's shards differ.

    By the types of its arrays; none with ``check_vma=False``, which has no such types.
    """
    mesh = jax.sharding.get_abstract_mesh()
    arrays = [x for x in jax.tree.leaves(leaf) if isinstance(x, jax.Array)]
    varying = {name for x in arrays for name in jax.typeof(x).manual_axis_type.varying}
    return tuple(n for n in mesh.manual_axes if n in varying and mesh.shape[n] > 1)


def number_of_shard(axes: tuple[str, ...]) -> jax.Array:
    """Which of the shards along these axes this is, as a uint32 scalar."""
    return lax.axis_index(axes).astype(jnp.uint32)
