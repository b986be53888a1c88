"""Weights of 4 to 16 bits as a pytree node: what :func:`quantize_params` makes.

How a value becomes a code is in :mod:`lowbit_optax._numerics.linear_code`, how codes
are packed in :mod:`pallas_kernels.bitfields.xla`.
"""

import contextlib
import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics import linear_code
from lowbit_optax._numerics.random_bits import RandomBits, leaf_number, random_bits
from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32
from lowbit_optax._numerics.streams import PARAM_STREAM
from lowbit_optax._step import trees
from pallas_kernels.bitfields.fields import GROUP
from pallas_kernels.bitfields.xla import pack, pack_axis, unpack

Rounding = typing.Literal["nearest", "stochastic"]

DEFAULT_GROUP = 2048
"""The paper's."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """An array as packed k-bit codes and the step of every group of neighbours.

    Made by :func:`quantize_params`. The arrays in it are uint32, so that modular
    differences of them, which ``update`` of :func:`lowbit_optax.lpmm_sgd` returns, land
    exactly by ``optax.apply_updates``.

    What is static describes the packed axis alone, counted from the end. So slices of a
    stack (``lax.scan`` over layers, ``jax.vmap``) are QuantizedTensors of one layer.

    Args:
      codes: uint32 words, of the array's shape with the packed axis ``n -> ceil(n/32)
        bits``.
      scales: uint32 patterns of float32 steps, of the array's shape with the packed
        axis ``n -> ceil(n / block_size)``.
      bits: k, of a code.
      block_size: values that share a step, a multiple of 32.
      axis: the packed axis, -1 or -2.
      length: n, the array's size along it.

    >>> import jax.numpy as jnp
    >>> w = quantize_params(jnp.linspace(-1, 1, 8192).reshape(2, 64, 64), bits=12)
    >>> w.shape, w.codes.shape, w.scales.shape
    ((2, 64, 64), (2, 24, 64), (2, 1, 64))
    >>> w.dequantize(jnp.bfloat16).dtype
    dtype(bfloat16)
    """

    codes: jax.Array
    scales: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        _register_with_flax()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that it stands for."""
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The array's rank."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The array's elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """float32, in which all of its values are exact."""
        return jnp.dtype(jnp.float32)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return 4 * (self.codes.size + self.scales.size)

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The array, exact in float32, rounded to nearest in other float dtypes.

        Raises:
          ValueError: if codes and scales are not of one array with these static sizes.
        """
        check_parts(self)
        fields = _unpack(self.codes, self.bits, self.shape, self.axis)
        values = linear_code.decode(fields, _steps(self), self.bits)
        return narrow_or_cast(values, dtype)


def quantize_params(
    params: typing.Any,
    bits: int = 12,
    block_size: int = DEFAULT_GROUP,
    min_size: int = 4096,
    seed: int = 0,
    rounding: Rounding = "nearest",
    stacked: Callable[[str], bool] | None = None,
) -> typing.Any:
    """Store a model's weights as codes of ``bits`` bits.

        x ~ c delta,  |c| <= B = 2^(bits-1) - 1,  delta >= max |x| / B  a group

    Args:
      params: tree of arrays. Leaves with fewer than ``min_size`` elements become
        float32; leaves that are not real floating-point stay as they are.
      bits: 4 to 16.
      block_size: values that share a step, a multiple of 32. They lie along
        :func:`pallas_kernels.pack_axis`, where a leaf's group ends with it.
      min_size: smaller leaves are not quantised.
      seed: of stochastic rounding.
      rounding: ``"nearest"`` (of the smallest error) or ``"stochastic"``. That of a
        training step is the optimizer's.
      stacked: tells by a leaf's path (``"['layers']['bias']"``) whether its first axis
        is a stack of layers, which is then not packed and can be sliced or scanned
        over. Needed for stacks of vectors only: in leaves of rank 3 or more the first
        axis is never packed.

    Returns:
      The tree with a :class:`QuantizedTensor` at the larger float leaves: ``bits + 32 /
      block_size`` bits a parameter.

    Raises:
      TypeError, ValueError: for arguments that are not as above; errors about a leaf
        name its path.

    References:
      LPMM, section 5.1 and 5.2, "Dynamic quantization".

    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64, jnp.bfloat16)}
    >>> quantized = quantize_params(params, bits=8)
    >>> quantized["w"].codes.shape, quantized["b"].dtype
    ((16, 64), dtype('float32'))
    """
    check_choices(bits, block_size, rounding)
    check_int("min_size", min_size, 0)
    check_int("seed", seed, 0, 2**32 - 1)
    names, leaves, treedef = named_leaves(params)
    draws = random_bits(
        jnp.uint32(seed), jnp.uint32(0), [leaf_number(name) for name in names]
    )

    def convert(name: str, leaf, random: RandomBits):
        if is_quantized(leaf):
            raise TypeError(
                f"quantize_params: params{name} is a QuantizedTensor already; "
                "dequantize it first"
            )
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(f"quantize_params: params{name} is {leaf!r}, not an array")
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"quantize_params: params{name} is {leaf.dtype}; accepted are real "
                "dtypes"
            )
        if not trees.is_float(leaf):
            return leaf
        x = to_float32(jnp.asarray(leaf))
        is_stack = stacked is not None and stacked(name)
        if x.ndim < 1 + is_stack or not x.size or x.size < min_size:
            return x
        axis = -1 if is_stack and x.ndim == 2 else pack_axis(x.shape) - x.ndim
        words = random if rounding == "stochastic" else None
        return quantize(x, bits, block_size, axis, words)

    return treedef.unflatten(map(convert, names, leaves, draws))


def dequantize(
    tree: typing.Any, dtype: jax.typing.DTypeLike = jnp.float32
) -> typing.Any:
    """Arrays in the place of every :class:`QuantizedTensor` of a tree.

    Args:
      tree: of parameters, or a part of them, such as one layer inside a scan.
      dtype: of the arrays; any float dtype.

    Returns:
      The tree; its other leaves stay as they are.

    Raises:
      ValueError: if the parts of a tensor do not belong together, naming its path.

    >>> import jax.numpy as jnp
    >>> params = quantize_params({"w": jnp.ones((64, 64)), "step": jnp.int32(1)})
    >>> dequantize(params, jnp.bfloat16)["w"].dtype
    dtype(bfloat16)
    """
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"dequantize: dtype is {jnp.dtype(dtype)}, not a float dtype")
    names, leaves, treedef = named_leaves(tree)

    def convert(name, leaf):
        with naming(name):
            return leaf.dequantize(dtype) if is_quantized(leaf) else leaf

    return treedef.unflatten(map(convert, names, leaves))


def quantize(
    x: jax.Array,
    bits: int,
    block_size: int,
    axis: int,
    random: RandomBits | None,
) -> QuantizedTensor:
    """One float32 array as a :class:`QuantizedTensor`.

    Args:
      x: float32, rank 1 or more.
      bits, block_size: as in :func:`quantize_params`.
      axis: to pack along: -1, or -2 where ``pack_axis`` says so.
      random: random bits of the leaf; None to round to nearest.
    """
    size = jnp.abs(x)
    size = jnp.where(size < jnp.float32(jnp.inf), size, jnp.float32(0))
    at = axis % x.ndim
    widths = [(0, -x.shape[axis] % block_size if i == at else 0) for i in range(x.ndim)]
    groups = jnp.pad(size, widths).reshape(
        *x.shape[:at], -1, block_size, *x.shape[at + 1 :]
    )
    delta = linear_code.delta_of(jnp.max(groups, axis=at + 1), bits)
    steps = _repeat(delta, block_size, axis, x.shape[axis])
    words = None if random is None else random.words(x.shape, PARAM_STREAM)
    fields = linear_code.encode(x, steps, bits, words)
    scales = lax.bitcast_convert_type(delta, jnp.uint32)
    codes = _pack(fields, bits, axis)
    return QuantizedTensor(codes, scales, bits, block_size, axis, x.shape[axis])


def requantize(
    x: jax.Array, old: QuantizedTensor, random: RandomBits | None
) -> QuantizedTensor:
    """A float32 array stored like ``old``, with steps of its own."""
    return quantize(x, old.bits, old.block_size, old.axis, random)


def is_quantized(x) -> bool:
    """Whether this is a weight that has to be dequantised to be read."""
    return isinstance(x, QuantizedTensor) or hasattr(x, "lpmm_tensor")


@contextlib.contextmanager
def naming(name: str):
    """Within it, errors about a tensor's parts name its leaf."""
    try:
        yield
    except (ValueError, AttributeError) as error:
        raise ValueError(f"params{name}: {error}") from error


def named_leaves(tree) -> tuple[list[str], list, typing.Any]:
    """As ``trees.named_leaves``; a quantised weight is one leaf."""
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_quantized)
    names = [jax.tree_util.keystr(path) for path, _ in with_path]
    return names, [leaf for _, leaf in with_path], treedef


def check_choices(bits: int, block_size: int, rounding: str) -> None:
    """Raise unless weights can be stored so."""
    check_int("bits", bits, 4, 16)
    check_int("block_size", block_size, GROUP)
    if block_size % GROUP:
        raise ValueError(f"lpmm: block_size is {block_size}, not a multiple of 32")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"lpmm: rounding is {rounding!r}, not 'nearest' or 'stochastic'"
        )


def check_int(name: str, value, low: int, high: int | None = None) -> None:
    """Raise unless an argument is a static int in its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"lpmm: {name} is {value!r}, and must be a static int; under "
            "optax.inject_hyperparams name it in static_args"
        )
    if value < low or (high is not None and value > high):
        accepted = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"lpmm: {name} is {value}; accepted are {accepted}")


@functools.cache
def _register_with_flax() -> None:
    """Tell flax, where it is installed, how to serialize a QuantizedTensor.

    ``flax.serialization`` takes an unknown pytree node for a leaf, and looks types up
    when it is called. It may be imported after the last tensor was made, so it is
    imported here with the first one: a tenth of what importing this package takes.
    """
    try:
        from flax import serialization
    except Exception:  # absent, or not of this JAX: then nobody serializes with it
        return
    serialization.register_serialization_state(
        QuantizedTensor, _to_state_dict, _from_state_dict, override=True
    )


def _to_state_dict(tensor: QuantizedTensor) -> dict:
    return {"codes": tensor.codes, "scales": tensor.scales}


def _from_state_dict(tensor: QuantizedTensor, state: dict) -> QuantizedTensor:
    for name in ("codes", "scales"):
        want = getattr(tensor, name).shape
        if name not in state or state[name].shape != want:
            given = list(state[name].shape) if name in state else "missing"
            raise ValueError(
                f"QuantizedTensor: {name} of the checkpoint are {given}, not "
                f"{list(want)}: was it saved with other bits or groups?"
            )
    return dataclasses.replace(tensor, **{k: state[k] for k in ("codes", "scales")})


def check_parts(tensor: QuantizedTensor) -> None:
    """Raise unless codes and scales are of one array with these static sizes."""
    codes, scales = tensor.codes, tensor.scales
    for name, part in (("codes", codes), ("scales", scales)):
        if part.dtype != jnp.uint32:
            raise ValueError(f"QuantizedTensor: {name} are {part.dtype}, not uint32")
    want_codes, want_scales = list(codes.shape), list(codes.shape)
    if codes.ndim >= -tensor.axis:
        want_codes[tensor.axis] = math.ceil(tensor.length / GROUP) * tensor.bits
        want_scales[tensor.axis] = math.ceil(tensor.length / tensor.block_size)
        if codes.shape == tuple(want_codes) and scales.shape == tuple(want_scales):
            return
    raise ValueError(
        f"QuantizedTensor: codes {list(codes.shape)} and scales {list(scales.shape)} "
        f"are not of {tensor.bits}-bit codes along axis {tensor.axis} of size "
        f"{tensor.length} with blocks of {tensor.block_size}. Was the packed axis "
        "sliced? See stacked= of quantize_params"
    )


def _steps(tensor: QuantizedTensor) -> jax.Array:
    delta = lax.bitcast_convert_type(tensor.scales, jnp.float32)
    return _repeat(delta, tensor.block_size, tensor.axis, tensor.length)


def _repeat(delta: jax.Array, block_size: int, axis: int, length: int) -> jax.Array:
    """Groups' numbers for every element."""
    at = axis % delta.ndim
    shape = delta.shape
    wide = jnp.broadcast_to(
        jnp.expand_dims(delta, at + 1), (*shape[: at + 1], block_size, *shape[at + 1 :])
    )
    wide = wide.reshape(*shape[:at], -1, *shape[at + 1 :])
    return lax.slice_in_dim(wide, 0, length, axis=at)


def _view(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape that ``pack`` packs along ``axis``, with the same elements."""
    if pack_axis(shape) - len(shape) == axis:
        return shape
    return (*shape[:-1], 1, shape[-1])


def _pack(fields: jax.Array, bits: int, axis: int) -> jax.Array:
    shape = list(fields.shape)
    shape[axis] = math.ceil(shape[axis] / GROUP) * bits
    return pack(fields.reshape(_view(fields.shape, axis)), bits).reshape(shape)


def _unpack(words: jax.Array, bits: int, shape: tuple[int, ...], axis: int):
    view = _view(shape, axis)
    if view != shape:
        words = words.reshape(*words.shape[:-1], 1, words.shape[-1])
    return unpack(words, bits, view).reshape(shape)
