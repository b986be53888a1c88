"""One leaf of the parameters, as it is stored, and the checks of what belongs to it."""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, is_narrow
from lowbit_optax._numerics.landing import Landing
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._step import trees
from lowbit_optax._step.context import layerwise
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from pallas_kernels.layout import layout_of


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
    """

    name: str
    param: typing.Any
    format: WeightFormat | None
    residual: typing.Any = None
    grad: typing.Any = None

    def with_residual(self, residual) -> "StoredLeaf":
        """The leaf with its residual, after checking that this belongs to it."""
        check_residual(self.name, self.param, self.format, residual)
        return dataclasses.replace(self, residual=residual)

    def with_grad(self, grad) -> "StoredLeaf":
        """The leaf with its gradient, after checking that this belongs to it."""
        check_grad(self.name, grad, self.param)
        return dataclasses.replace(self, grad=grad)

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
    def words_read(self) -> tuple[int, int] | None:
        """What its weight format reads of a stream; None without a format."""
        return self.format and self.format.words_read(self.param.dtype)

    def landed(self, update, random: RandomBits, landing: Landing) -> Landed:
        """Add the inner update to the master and store it."""
        if self.format is None:
            is_direct = landing.is_direct
            return Landed(
                optax.apply_updates(self.param, update) if is_direct else update
            )
        advance = lambda *arrays: _advance(self.format, landing, *arrays, random)
        update = update.astype(jnp.float32)
        return Landed(*layerwise(advance)(self.param, self.residual, update))


@functools.partial(jax.jit, static_argnums=0)
def widen(format_: WeightFormat, param):
    """The parameter as a master; traced once per format and shape."""
    return format_.widen(param)


@functools.partial(jax.jit, static_argnums=0)
def _inner_weight(format_: WeightFormat, param, residual):
    return format_.inner_weight(param, residual)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advance(format_: WeightFormat, landing: Landing, param, residual, update, random):
    new, after, result = format_.advance(param, residual, update, random, landing)
    if format_.error_into is None:
        return result, after, None
    return result, after, format_.error(param, residual, update, new, after)


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
        trees.check_quantized(name, leaf)
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
    format_ = weights.for_leaf(leaf.shape, leaf.dtype, min_size)
    if format_.width:
        check_shards(name, leaf, format_.width)
    return format_


def check_grad(name: str, grad, param) -> None:
    """Raise unless a gradient is a float array of its parameter's shape."""
    if trees.is_quantized(grad):
        raise TypeError(
            f"lowbit: gradient of params{name} is a QuantizedTensor; accepted is an "
            f"array of shape {param.shape}, see lowbit_optax.lpmm.value_and_grad"
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


def check_residual(name: str, param, format_: WeightFormat | None, part) -> None:
    """Raise a ValueError unless a leaf's residual belongs to its parameter."""
    if format_ is None and part is not None:
        raise ValueError(
            f"lowbit: params{name} is {param.dtype}, but the state holds the "
            f"residual of a lower precision, {trees.describe(part)}: was it cast "
            "on the way, as equinox.apply_updates does when it adds float32 "
            "updates? Apply updates by lowbit_optax.apply_updates or "
            "optax.apply_updates, or step by lowbit_optax.step"
        )
    want = None
    if format_ is not None and not trees.is_quantized(param):
        want = _residual_like(format_, param.shape, param.dtype)
    if part is None and want is not None:
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


@functools.lru_cache(maxsize=4096)
def _residual_like(format_: WeightFormat, shape: tuple[int, ...], dtype):
    return jax.eval_shape(format_.init, jax.ShapeDtypeStruct(shape, dtype))


def check_shards(name: str, leaf, bits: int, block_size: int | None = None) -> None:
    """Raise unless a leaf's shards on explicit axes are whole words and blocks.

    On automatic axes XLA moves what is cut; on explicit ones JAX raises an error of a
    reshape deep inside, which names no leaf.
    """
    if not isinstance(leaf, jax.Array):
        return
    sharding = jax.typeof(leaf).sharding
    layout = layout_of(leaf.shape)
    packed = f"{bits}-bit fields"
    if block_size is not None:
        packed += f" in blocks of {block_size}"
    for axis, entry in enumerate(sharding.spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        shards = math.prod(sharding.mesh.shape.get(name, 1) for name in names)
        unit = layout.unit(axis, (bits,), block_size)
        length = leaf.shape[axis] // shards
        if shards > 1 and length % unit:
            raise ValueError(
                f"params{name}, {trees.describe(leaf)} on explicit axes as "
                f"{sharding.spec}, has shards of {length} along axis {axis}; accepted "
                f"are multiples of {unit}, for {packed}. "
                "Shard it along another axis or over fewer devices, make the mesh's "
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
