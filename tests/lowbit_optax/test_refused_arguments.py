"""Expressions with arguments that raise an error, and a pattern of its message."""

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax import (
    block_scaling,
    emulation,
    formats,
    loss_scaling,
    lpmm,
    precision,
    release,
    reports,
    transformations,
)

pytestmark = pytest.mark.standard_promotion

# The names that the expressions below use.
MODULES = [
    *(lowbit_optax, block_scaling, formats, loss_scaling, lpmm, reports),
    transformations,
]
NAMES = {name: getattr(x, name) for x in MODULES for name in x.__all__} | {
    **dict(emulation=emulation, lpmm=lpmm, precision=precision, release=release),
    **dict(jax=jax, jnp=jnp, optax=optax, FloatFormat=precision.FloatFormat),
    **dict(BF16=jnp.bfloat16, F16=jnp.float16, F32=jnp.float32),
    **dict(W=jnp.ones((64, 64)), NARROW=jnp.ones(3, jnp.bfloat16)),
    "MASTER": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(40)},
    "SGD": optax.sgd(0.1),
    "LOW": lowbit_optax.lowbit(optax.sgd(0.1), weights=lowbit_optax.extra_bits(8)),
}

REFUSED = {
    "weight formats": [
        ("extra_bits(-1)", "bits is -1; bfloat16 takes 0 to 16"),
        ("extra_bits(22)", "bits is 22; bfloat16 takes 0 to 16"),
        ("extra_bits(8.0)", "bits is .*static int"),
        ("extra_bits(True)", "bits is .*static int"),
        ("extra_bits(jnp.int32(8))", "bits is .*static int"),
        ("extra_bits(8, rounding='up')", "rounding is 'up'.*nearest.*toward_zero"),
        ("extra_bits(8, residual_rounding=None)", "'nearest', 'stochastic', 'toward_z"),
        ("extra_bits(sum_rounding='up')", "sum_rounding is 'up', not 'nearest' or"),
        ("stochastic_rounding(sum_rounding='up')", "sum_rounding is 'up', not 'near"),
        ("stochastic_rounding(error_feedback=1)", "error_feedback is 1"),
        ("kahan(rounding='toward_zero')", "rounding is 'toward_zero'.*'nearest'"),
        ("kahan(residual_rounding='up')", "l_rounding is 'up'.*'near"),
        ("kahan(arithmetic='bfloat16')", "arithmetic is 'bfloat16'.*'param'"),
        ("kahan(float_format='bfloat16')", r"accepted is FloatFormat\(8, m\)"),
        ("kahan(float_format=FloatFormat(8, 0))", r"accepted is FloatFormat\(8, m\)"),
        ("nearest(float_format=FloatFormat(5, 10))", "accepted is FloatFormat"),
        ("stochastic_rounding(float_format=FloatFormat(8, 8))", "accepted is Float"),
    ],
    "moment formats": [
        ("cast(F32)", "dtype is float32, not one of bfloat16.*leave"),
        ("cast(jnp.int8)", "dtype is int8, not one of bfloat16"),
        ("cast(None)", "dtype is .*accepted are fl"),
        ("cast(jnp.zeros_like)", "dtype is .*accepted are fl"),
        ("cast('float16', rounding='up')", "rounding is 'up', not 'nearest'"),
        ("block_quantized(2)", "bits is 2, not 4, 6 or 8"),
        ("block_quantized(8.0)", "bits is 8.0"),
        ("block_quantized(True)", "bits is True"),
        ("block_quantized(code='log2')", "code is 'log2', not None or one of linear"),
        (
            "block_quantized(block_size=48)",
            "48; accepted are the powers of two",
        ),
        ("block_quantized(block_size='32')", "block_size is '32'"),
        ("block_quantized(rounding='up')", "rounding is 'up'"),
        (
            "block_quantized(scale='float16')",
            "scale is 'float16', not None, 'bfl",
        ),
        ("block_quantized(6, code='linear')", "bits is 6 and code 'linear'; accepted"),
        ("block_quantized(4, code='nested')", "'nested' and bits is 4, not 6 or 8"),
        ("block_quantized(6, scale='bfloat16')", "'bfloat16', but code 'nested'"),
        ("register_moments(3)", "state_class is 3"),
        ("register_moments(int)", "accepted is a NamedTuple"),
        (
            "register_moments(optax.TraceState, averages=('nu',))",
            "TraceState has no field 'nu'; it has trace",
        ),
    ],
    "lowbit": [
        ("lowbit(optax.adamw)", r"call it first.*optax\.adamw\(1e-3\)"),
        ("lowbit(SGD, implementation='gpu')", "'pallas', 'triton', 'mosaic' or 'tpu'"),
        ("kahan_sgd(0.1, implementation=1)", "1, not None, 'xla', 'pallas'"),
        ("lowbit(SGD, seed=-1)", "seed is -1"),
        ("lowbit(SGD, seed=2**32)", "seed is 4294967296"),
        ("lowbit(SGD, seed=1.5)", "seed is .*static int"),
        ("lowbit(SGD, min_size=-1)", "min_size is -1"),
        ("lowbit(SGD, min_size='1')", "min_size is .*static"),
        ("lowbit(SGD, weights='kahan')", "weights is .*not a weight format"),
        ("lowbit(SGD, weights=kahan)", "weights is .*not a weight format"),
        ("lowbit(SGD, weights=cast(BF16))", "weights is .*not a weight format"),
        ("lowbit(SGD, moments=kahan())", "moments has .*not a moment format"),
        ("lowbit(SGD, moments='lower')", r"has 'lower'.* not 'low' or 'float32'"),
        ("lowbit(SGD, moments={'mu': 8})", "moments has .*not a moment format"),
        ("extra_bits_adamw(1e-3, bits=22)", "bits is 22"),
    ],
    "the 16-bit unit": [
        ("emulation.sixteen_bit_adamw(0.1, b2=0.999)", r"b2 is 0\.999, which is 1 in"),
        ("emulation.sixteen_bit_adamw(0.1, b1=0.999)", r"b1 is 0\.999, which is 1 in"),
        ("emulation.sixteen_bit_adamw(0.1, dtype=F16)", "take 6.0e-08 or larger"),
        ("emulation.sixteen_bit_adamw(0.1, eps=0.0)", r"eps is 0\.0"),
        ("emulation.sixteen_bit_sgd(0.1, rounding='up')", "'up', not 'kahan'"),
        ("emulation.sixteen_bit_sgd(0.1, dtype=F32)", "dtype is float32, not bfl"),
        ("emulation.sixteen_bit_sgd(float('nan'))", "learning_rate is nan"),
    ],
    "other transformations": [
        ("ema_of_params(1.0)", r"decay is 1\.0.* from 0 to below 1"),
        ("ema_of_params(float('nan'))", "decay is nan.* from 0 to below 1"),
        ("ema_of_params(True)", "decay is True.* from 0 to below 1"),
        ("regularize(0.1)", r"penalty is 0\.1; accepted is a function"),
        ("direct_updates(3)", "tx is 3"),
        ("accumulate_gradients(SGD, 0)", "accumulate_gradients: every is 0"),
        ("accumulate_gradients(SGD, 2.0)", r"every is 2\.0"),
        ("accumulate_gradients(SGD, True)", "every is True"),
        ("accumulate_gradients(3, 2)", "inner is 3"),
        ("accumulate_gradients(lpmm_sgd, 2)", "inner is <function"),
        ("accumulate_gradients(SGD, 2, jnp.int8)", "format is .* not a moment format"),
        *(
            (
                f"accumulate_gradients(SGD, 2, block_quantized(8, code='{code}'))",
                "no negative values",
            )
            for code in ("sqrt", "float", "log")
        ),
        (
            "accumulate_gradients(SGD, 2, block_quantized(8, relative_to='nu'))",
            "no second moment to be relative to",
        ),
    ],
    "loss scales": [
        ("static_scale(0.0)", r"scale is 0\.0"),
        ("static_scale(float('inf'))", "scale is inf"),
        ("backoff_scale(factor=1.0)", r"factor is 1\.0"),
        ("backoff_scale(period=0)", "period is 0"),
        ("backoff_scale(2.0, smallest=4.0)", r"initial is 2\.0"),
        ("log_normal_scale(overflow_probability=1.0)", r"probability is 1\.0"),
        ("log_normal_scale(decay=1.0)", r"decay is 1\.0"),
        ("log_normal_scale(least_deviation=-1.0)", r"least_deviation is -1\.0"),
        ("with_loss_scale(SGD, 1024.0)", "scaling is 1024"),
        ("current_loss_scale(SGD.init(W))", "0 loss scales"),
    ],
    "quantised weights": [
        ("quantize_params(W, bits=3)", "bits is 3; accepted are 4 to 16"),
        ("quantize_params(W, bits=17)", "bits is 17"),
        ("quantize_params(W, bits=12.0)", r"bits is 12\.0"),
        ("quantize_params(W, block_size=33)", "block_size is 33; accepted are the"),
        ("quantize_params(W, rounding='up')", "rounding is 'up'"),
        ("quantize_params(W, min_size=-1)", "min_size is -1"),
        ("quantize_params(W, stacked='w')", "stacked is 'w'; accepted are None and"),
        ("quantize_params({'a': {'b': W * 1j}})", r"\['a'\]\['b'\] is complex64"),
        ("quantize_params({'w': quantize_params(W)})", r"\['w'\] is a QuantizedTensor"),
        ("quantize_params({'w': 'x'})", r"params\['w'\] is 'x', not an array"),
        ("lpmm_sgd(0.1, momentum_bits=6)", "lpmm_sgd: momentum_bits is 6; accepted"),
        ("lpmm_adam(0.1, momentum_bits=8.0)", r"lpmm_adam: momentum_bits is 8\.0"),
        ("lpmm_adam(0.1, block_size=48)", "lpmm_adam: block_size is 48; accepted are"),
        ("lpmm_sgd(0.1, rounding='up')", "lpmm_sgd: rounding is 'up'"),
        ("lpmm_adam(0.1, seed=1.5)", r"seed is 1\.5"),
        ("block_scale(W[:40], axis=-2, min_size=0)", r"axis -2 of shape \[40, 64\]"),
        ("block_scale({'w': W}, axis=2, min_size=0)", "has no axis 2"),
        ("block_scale({'w': W}, axis=0.5)", r"axis is 0\.5 for params\['w'\]"),
        ("block_scale({'w': 0.5})", r"params\['w'\] is 0\.5, not an array"),
        ("block_scale(block_scale(W))", "is a BlockScaledTensor already"),
    ],
    "starts, splits and plans": [
        ("from_master(LOW, MASTER, None)", "dtype is None; accepted are floating"),
        ("from_master(LOW, MASTER, {'bias': BF16})", "the structure of params"),
        (
            "from_master(LOW, MASTER, jax.tree.map(lambda x: bool, MASTER))",
            r"bool for params\['bias'\], which .*; accepted are bf",
        ),
        ("from_master(LOW, {'w': 'x'})", r"params\['w'\] is 'x', not an array"),
        ("from_master(LOW, {'w': [1.0]}, BF16)", r"\['w'\]\[0\] is 1\.0, not an array"),
        ("from_master(SGD, MASTER, BF16)", "no LowbitState"),
        ("master_weights(W, SGD.init(W))", "no LowbitState"),
        ("split_array(W, F32, kahan())", "dtype is float32"),
        ("split_array(W, None, kahan())", "dtype is .*accepted are floating"),
        ("split_array(W, F16, extra_bits(16))", "takes 0 to 13 .*not 16"),
        (
            "split_array(W[0] * 1j, BF16, kahan())",
            r"complex64\[64\]; accepted are",
        ),
        ("split_array(W, BF16, kahan()) + jnp.complex64(1j)", "complex64"),
        ("plan(MASTER, 1e9, optimizer=SGD)", "a function of the learning"),
        ("plan(MASTER, 1e9, optimizer=lambda rate: rate)", "a function of the learn"),
        ("plan(MASTER, 1e9, devices=0)", "devices is 0; accepted is an int from 1"),
        ("plan(MASTER, 1e9, other_bytes=-1)", "other_bytes is -1; accepted"),
        ("plan(MASTER, '80GB')", "device_bytes is '80GB'; accepted is a num"),
        ("plan({'w': 3}, 1e9)", r"params\['w'\] is 3, not an array"),
        ("plan(MASTER, 1e9)['adam']", "no formats 'adam'; there are float32, extra"),
    ],
    "precision": [
        ("FloatFormat(1, 2)", "exponent_bits must be 2 to 8, got 1"),
        ("FloatFormat(9, 2)", "exponent_bits must be 2 to 8, got 9"),
        ("FloatFormat(4, 24)", "mantissa_bits must be 0 to 23"),
        ("FloatFormat(4, 3.0)", "mantissa_bits must be an integer, got 3.0"),
        ("FloatFormat(4, 3, 3.0)", "bias must be an integer, got 3.0"),
        ("FloatFormat(4, 3, specials='fn')", 'specials must be "none", "nan", "ieee"'),
        ("FloatFormat(4, 3, overflow='wrap')", 'overflow must be "saturate" or "inf'),
        ("FloatFormat(8, 3, specials='none')", "-126 to 127; got -126 to 128"),
        ("FloatFormat(8, 3, 1)", "-126 to 127; got -127 to 127"),
        ("FloatFormat(4, 3, 121)", "-126 to 127; got -127 to -113"),
        ("FloatFormat(4, 3, -120)", "-126 to 127; got 114 to 128"),
        ("FloatFormat.of('int8')", "int8; accepted: float32, bfloat16"),
        ("FloatFormat.of('float8_e8m0fnu')", "e8m0fnu; accepted: float32, bfloat16"),
        (
            "FloatFormat(4, 3).round(jnp.arange(2))",
            r"at most 32 bits, got int32",
        ),
        ("FloatFormat(4, 3).decode(NARROW)", "unsigned integers, got bfloat16"),
        (
            "FloatFormat(4, 3).round(NARROW, NARROW)",
            r"random must be uint32",
        ),
        ("precision.pack(NARROW, 12)", "float_format is 12, not a FloatFormat"),
        ("precision.Formats('float8_e5m2', precision.FP32)", "FloatFormat"),
        ("precision.trace(lambda w: w, W)", "accepted is a float scalar"),
        ("precision.trace(lambda w: jnp.int32(1), W)", "accepted is a float scalar"),
        ("precision.trace(lambda w: (w.sum(), w), W)", "accepted is a float scalar"),
    ],
}
TAKE_A_DTYPE = (
    "from_master(LOW, MASTER, {})",
    "plan(MASTER, 1e9, dtype={})",
    "memory_report(lpmm_sgd(0.1), MASTER, grad_dtype={})",
    "step_memory(lpmm_sgd(0.1), MASTER, jnp.sum, grad_dtype={})",
    "dequantize(quantize_params(MASTER), {})",
    "quantize_params(W).dequantize({})",
    "lpmm.value_and_grad(jnp.sum, {})",
    "release.value_and_update(jnp.sum, SGD, grad_dtype={})",
)
NO_FLOATS = ("jnp.int8", "jnp.complex64", "None", "'bfloat17'", "jnp.zeros_like", "{}")
REFUSED["dtypes"] = [
    (code.replace("{}", dtype), "dtype is .*; accepted are floating")
    for code in TAKE_A_DTYPE
    for dtype in NO_FLOATS
]


@pytest.mark.parametrize("group", REFUSED)
def test_errors_say_what_was_given_and_what_is_accepted(group):
    for code, message in REFUSED[group]:
        with pytest.raises((TypeError, ValueError, KeyError), match=message):
            eval(code, NAMES)
