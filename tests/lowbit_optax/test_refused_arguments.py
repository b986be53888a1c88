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
from lowbit_optax.precision import FloatFormat

pytestmark = pytest.mark.standard_promotion

# The names that the expressions below use, besides those of this file.
MODULES = [
    *(lowbit_optax, block_scaling, formats, loss_scaling, lpmm, reports),
    transformations,
]
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}
PUBLIC |= dict(emulation=emulation)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3B11 = jnp.float8_e4m3b11fnuz
W, NARROW = jnp.ones((64, 64)), jnp.ones(3, BF16)
MASTER = {"kernel": W, "bias": jnp.ones(40)}
HALF, NARROW_W = {"w": jnp.ones(4, F16)}, {"w": jnp.ones((512, 30), BF16)}
BLOCKS = block_scaling.block_scale({"w": W})
CUT_BLOCKS = {"w": jax.tree.map(lambda x: x[:32], BLOCKS["w"])}
QUANTIZED = lpmm.quantize_params({"w": W}, bits=8)
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
MULTI_STEPS = optax.MultiSteps(ADAM, 3).gradient_transformation()
LOW = lowbit_optax.lowbit(SGD, weights=lowbit_optax.extra_bits(8))
SCALED = lowbit_optax.with_loss_scale(SGD, loss_scaling.backoff_scale())
IN_FLOAT32 = lowbit_optax.accumulate_gradients(SGD, 2, min_size=10**9)
LPMM = lowbit_optax.lpmm_sgd(0.1)
SUMS = lowbit_optax.accumulate_gradients(LPMM, 2)
FED = lowbit_optax.stochastic_rounding(error_feedback="mu")
TWELVE = FloatFormat(8, 3)
EMA = lowbit_optax.ema_of_params(0.9)
product = lambda w: jnp.sum(w @ w)
native = lambda x: precision.apply(product, x, products="native")(W)
PLAN = precision.trace(product, W)
ALL_LOW = precision.uniform(PLAN)
MESH = jax.sharding.AbstractMesh((8,), ("x",))
PLACE = jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P(None, None, "x"))


def stepped(tx, params=NARROW_W):
    lowbit_optax.step(tx, params, tx.init(params), params)


def released(loss_fn, tx=SGD, params=W, **options):
    release.value_and_update(loss_fn, tx, **options)(params, tx.init(params))


def lpmm_update(grad, tx=LPMM, made_by=None):
    tx.update({"w": grad}, (made_by or tx).init(QUANTIZED), QUANTIZED)


# By group an expression a line, and behind it a pattern of the message.
REFUSED = {
    "weight formats": r"""
extra_bits(-1)  # bits is -1; bfloat16 takes 0 to 16
extra_bits(22)  # bits is 22; bfloat16 takes 0 to 16
extra_bits(8.0)  # bits is .*static int
extra_bits(True)  # bits is .*static int
extra_bits(jnp.int32(8))  # bits is .*static int
extra_bits(8, rounding='up')  # rounding is 'up'.*nearest.*toward_zero
extra_bits(8, residual_rounding=None)  # 'nearest', 'stochastic', 'toward_z
extra_bits(sum_rounding='up')  # sum_rounding is 'up', not 'nearest' or
stochastic_rounding(sum_rounding='up')  # sum_rounding is 'up', not 'near
stochastic_rounding(error_feedback=1)  # error_feedback is 1
kahan(rounding='toward_zero')  # rounding is 'toward_zero'.*'nearest'
kahan(residual_rounding='up')  # l_rounding is 'up'.*'near
kahan(arithmetic='bfloat16')  # arithmetic is 'bfloat16'.*'param'
kahan(float_format='bfloat16')  # accepted is FloatFormat\(8, m\)
kahan(float_format=FloatFormat(8, 0))  # accepted is FloatFormat\(8, m\)
nearest(float_format=FloatFormat(5, 10))  # accepted is FloatFormat
stochastic_rounding(float_format=FloatFormat(8, 8))  # accepted is Float
""",
    "moment formats": r"""
cast(F32)  # dtype is float32, not one of bfloat16.*leave
cast(jnp.int8)  # dtype is int8, not one of bfloat16
cast(None)  # dtype is .*accepted are fl
cast(jnp.zeros_like)  # dtype is .*accepted are fl
cast('float16', rounding='up')  # rounding is 'up', not 'nearest'
block_quantized(2)  # bits is 2, not 4, 6 or 8
block_quantized(8.0)  # bits is 8.0
block_quantized(True)  # bits is True
block_quantized(code='log2')  # code is 'log2', not None or one of linear
block_quantized(block_size=48)  # 48; accepted are the powers of two
block_quantized(block_size='32')  # block_size is '32'
block_quantized(rounding='up')  # rounding is 'up'
block_quantized(scale='float16')  # scale is 'float16', not None, 'bfl
block_quantized(6, code='linear')  # bits is 6 and code 'linear'; accepted
block_quantized(4, code='nested')  # 'nested' and bits is 4, not 6 or 8
block_quantized(6, scale='bfloat16')  # 'bfloat16', but code 'nested'
register_moments(3)  # state_class is 3
register_moments(int)  # accepted is a NamedTuple
register_moments(optax.TraceState, averages=('nu',))
    # TraceState has no field 'nu'; it has trace
""",
    "lowbit": r"""
lowbit(optax.adamw)  # call it first.*optax\.adamw\(1e-3\)
lowbit(SGD, implementation='gpu')  # 'pallas', 'triton', 'mosaic' or 'tpu'
kahan_sgd(0.1, implementation=1)  # 1, not None, 'xla', 'pallas'
lowbit(SGD, seed=-1)  # seed is -1
lowbit(SGD, seed=2**32)  # seed is 4294967296
lowbit(SGD, seed=1.5)  # seed is .*static int
lowbit(SGD, min_size=-1)  # min_size is -1
lowbit(SGD, min_size='1')  # min_size is .*static
lowbit(SGD, weights='kahan')  # weights is .*not a weight format
lowbit(SGD, weights=kahan)  # weights is .*not a weight format
lowbit(SGD, weights=cast(BF16))  # weights is .*not a weight format
lowbit(SGD, moments=kahan())  # moments has .*not a moment format
lowbit(SGD, moments='lower')  # has 'lower'.* not 'low' or 'float32'
lowbit(SGD, moments={'mu': 8})  # moments has .*not a moment format
extra_bits_adamw(1e-3, bits=22)  # bits is 22
""",
    "parameters of a transformation": r"""
kahan_sgd(0.1).init({'w': 'text'})  # params\['w'\]
kahan_sgd(0.1).init({'w': object()})  # params\['w'\]
kahan_sgd(0.1).init({'w': 1.0})  # params\['w'\]
kahan_sgd(0.1).init({'w': W.astype(E4M3B11)})  # \['w'\] is float8_e4m3b11.*acc
lowbit(SGD, weights=nearest(float_format=TWELVE)).init(HALF)  # \['w'\].*not float16
lowbit(SGD, weights=stochastic_rounding(float_format=TWELVE)).init(HALF)
    # \['w'\].*not float16
lowbit(SGD, weights=kahan(float_format=TWELVE)).init(HALF)  # \['w'\].*not float16
lowbit(SGD, weights=kahan()).init(BLOCKS)  # \['w'\]: .*accepted are extra_bits, st
lowbit(SGD, weights=extra_bits(21)).init(BLOCKS)
    # params\['w'\]: .*0 to 20 extra bits, not 21
lowbit(kahan_adamw(1e-3)).init(W)  # already.*kahan_adamw
lowbit(optax.chain(SGD, kahan_adamw(1e-3))).init(W)  # already.*kahan_adamw
lowbit(optax.lbfgs(), moments=block_quantized(8)).init(W)
    # moments cannot be found.*float32
lowbit(ADAM, moments=block_quantized(6)).init(W)  # 'mu' may be negative; take 4 or 8 b
lowbit(ADAM, moments=block_quantized(8, code='sqrt')).init(W)  # 'sqrt'.*'mu' may be
lowbit(ADAM, moments=block_quantized(8, code='log')).init(W)  # 'log'.*'mu' may be
lowbit(ADAM, moments=block_quantized(8, code='float')).init(W)  # 'float'.*'mu' may be
lowbit(ADAM, moments={'mu': block_quantized(4, relative_to='mu')}).init(W)
    # 'mu'.* relative to 'mu'.*\['nu'\]
lowbit(ADAM, moments={'mu': block_quantized(4, relative_to='nu_max')}).init(W)
    # 'mu'.* relative to 'nu_max'.*\['nu'\]
lowbit(ADAM, moments={'nu': cast(BF16), 'trace': cast(F16)}).init(W)
    # 'trace'.*\['mu', 'nu'\]
lowbit(ADAM, moments={'nu': cast(BF16), 'trace': 'float32'}).init(W)
    # 'trace'.*\['mu', 'nu'\]
kahan_sgd(0.1, moments={'mu': cast(BF16)}).init(W)  # 'mu'.*\[\]
lowbit_muon(0.02, ns_dtype=F16)  # ns_dtype is float16
lowbit_muon(0.02, beta=None)  # beta is None
lowbit_muon(0.02, is_matrix=lambda *_: True).init(MASTER)
    # params\['bias'\], whose shape
""",
    "arguments of another kind": r"""
memory_report(LOW, LOW.init(W))  # params are a LowbitState.*must be
memory_report(MASTER, LOW)  # tx is a dict, not an optax
explain(LOW, LOW.init(W))  # params are a LowbitState.*must be
explain(MASTER, LOW)  # tx is a dict, not an optax
step(MASTER, LOW, LOW.init(W), W)  # tx is a dict, not an optax
step(lowbit(ADAM), W, EMA.init(W), W)  # EmaOfParamsState.*ScaleByAdamState
step(lowbit(ADAM, moments='float32'), W, EMA.init(W), W)
    # EmaOfParamsState.*ScaleByAdamState
step(SUMS, W, EMA.init(W), W)  # state is a LowbitState.*AccumulationState
with_loss_scale(MASTER, static_scale())  # inner is a dict, not an optax
with_loss_scale(SGD, static_scale()).update(W, SGD.init(W), W)  # not a LossScaleState
accumulate_gradients(SGD, 2).update(MASTER, IN_FLOAT32.init(MASTER), MASTER)
    # accumulator of params\['kernel'\]
release.value_and_update(jnp.sum, SGD, max_grad_norm=0.0)  # max_grad_norm
release.value_and_update(jnp.sum, SGD, max_grad_norm=-1.0)  # max_grad_norm
release.value_and_update(jnp.sum, SGD, max_grad_norm='1')  # max_grad_norm
release.value_and_update(jnp.sum, SGD, max_grad_norm=True)  # max_grad_norm
release.value_and_update(jnp.sum, SGD, state_memory='host')
    # 'pinned_host'; it is 'host'
release.explain(jnp.sum, SGD, state_memory=None)  # 'pinned_host'; it is None
""",
    "shardings": r"""
state_shardings(LOW, NARROW_W, {'w': 'x'}, mesh=MESH)
    # params\['w'\] is 'x'; accepted are a NamedSharding
state_shardings(LOW, NARROW_W, {'w': None}, mesh=MESH)  # params\['w'\] is None
state_shardings(LOW, NARROW_W, {}, mesh=MESH)  # structure of params
state_shardings(LOW, NARROW_W, jax.P(None, None, 'x'), mesh=MESH)
    # params\['w'\] has 2 axes
state_shardings(LOW, NARROW_W, jax.P(None, 'x'), mesh=MESH)
    # axis 1 of params\['w'\].*8 shards
state_shardings(LOW, NARROW_W, jax.P('x'))  # no mesh.*params\['w'\].*jax.set_mesh
state_shardings(LOW, {}, jax.P(), uneven='pad')  # 'other_axis', 'replicate'
stepped(kahan_sgd(1, param_shardings=jax.P('x')))  # no mesh for the Parti.* of params
stepped(kahan_sgd(1, param_shardings='x'))  # sharding of params.* is 'x'; accepted are
stepped(kahan_sgd(1.0, param_shardings={'v': PLACE}))  # have the structure of params
stepped(kahan_sgd(1.0, param_shardings=PLACE))  # params\['w'\] has 2 axes
""",
    "gradients and states of quantised weights": r"""
lpmm_update(jnp.ones((64, 65)))  # \['w'\].*shape \(64, 65\)
lpmm_update(jnp.ones((64, 64), jnp.int32))  # \['w'\].*is int32
lpmm_update(QUANTIZED['w'])  # \['w'\].*is a QuantizedTensor; accepted is
lpmm_update(1.0)  # \['w'\].*not an array
lpmm_update(jnp.ones((64, 65)), SUMS)  # \['w'\].*shape \(64, 65\)
lpmm_update(jnp.ones((64, 64), jnp.int32), SUMS)  # \['w'\].*is int32
lpmm_update(QUANTIZED['w'], SUMS)  # \['w'\].*is a QuantizedTensor; accepted is
lpmm_update(1.0, SUMS)  # \['w'\].*not an array
lpmm_update(W, lpmm_sgd(0.1, 0.9), lpmm_sgd(0.1, 0.9, block_size=32))  # other moments
dequantize({'w': jax.tree.map(lambda x: x[:1], QUANTIZED['w'])})
    # params\['w'\].*8-bit codes
lpmm_sgd(0.1).init({'w': jax.tree.map(lambda x: x[:1], QUANTIZED['w'])})
    # params\['w'\].*8-bit codes
CUT_BLOCKS['w'].dequantize()  # scales \[2, 64\] are not of codes \[32, 64\]
lowbit(SGD).init(CUT_BLOCKS)  # params\['w'\]: .*scales \[2, 64\]
stepped(lowbit(SGD), BLOCKS)  # is a BlockScaledTensor; accepted is an array
""",
    "errors into a moment": r"""
stepped(lowbit(optax.contrib.muon(1e-3), weights=FED))
    # error_feedback.*'w'.*not linear
stepped(lowbit(optax.lion(1e-3), weights=FED))  # error_feedback.*sign is not linear
stepped(lowbit(optax.chain(ADAM, optax.clip(1.0)), weights=FED))
    # error_feedback.*not linear
stepped(lowbit(optax.sgd(1e-3, momentum=0.9), weights=FED))
    # error_feedback.*no float32 moment.*params\['w'\]
stepped(sr_sgd(1e-3, error_feedback='trace'))
    # error_feedback.*no float32 moment.*params\['w'\]
stepped(lowbit(optax.adam(1e-3, mu_dtype=BF16), weights=FED, moments='float32'))
    # error_feedback.*no float32 moment
stepped(lowbit(optax.masked(ADAM, {'w': False}), weights=FED))
    # error_feedback.*no float32 moment
stepped(lowbit(optax.chain(ADAM, ADAM), weights=FED))  # error_feedback.*several
stepped(lowbit(optax.apply_if_finite(MULTI_STEPS, 3), weights=FED))
    # error_feedback with optax\.MultiSteps in
""",
    "release": r"""
released(lambda w: w[0])  # \(64,\)|\[64\]
released(lambda w: jnp.int32(1))  # int32
released(lambda w: jax.lax.complex(1.0, 1.0))  # complex64
released(lambda w: (w.sum(), w))  # has_aux
released(jnp.sum, has_aux=True)  # has_aux
released(lambda w: (w.sum(), w, w), has_aux=True)  # has_aux
released(lambda w: [w.sum(), w], has_aux=True)  # has_aux
released(lambda w: None)  # None
released(jnp.sum, params={'rate': 1.0})  # params\['rate'\]
released(jnp.sum, params={'rate': 3})  # params\['rate'\]
released(jnp.sum, params={'rate': 'text'})  # params\['rate'\]
released(jnp.sum, optax.lbfgs())  # needs more than gradients: .*'value'
released(jnp.sum, optax.polyak_sgd())  # needs more than gradients: .*'value'
released(jnp.sum, SCALED, overflow='skip')  # must be 'exact' or 'layer'; it is 'skip'
released(jnp.sum, SGD, overflow='layer')  # accepted is with_loss_scale
released(jnp.sum, SCALED, overflow='layer', max_grad_norm=1.0)
    # cannot be combined with max_grad_norm, which is 1.0
released(jnp.sum, optax.chain(SCALED))  # inside another transformation, at state\[0\]
release.value_and_update(jnp.sum, SCALED)(W, LOW.init(W))
    # state is a LowbitState, not a LossScaleState
""",
    "the 16-bit unit": r"""
emulation.sixteen_bit_adamw(0.1, b2=0.999)  # b2 is 0\.999, which is 1 in
emulation.sixteen_bit_adamw(0.1, b1=0.999)  # b1 is 0\.999, which is 1 in
emulation.sixteen_bit_adamw(0.1, dtype=F16)  # take 6.0e-08 or larger
emulation.sixteen_bit_adamw(0.1, eps=0.0)  # eps is 0\.0
emulation.sixteen_bit_sgd(0.1, rounding='up')  # 'up', not 'kahan'
emulation.sixteen_bit_sgd(0.1, dtype=F32)  # dtype is float32, not bfl
emulation.sixteen_bit_sgd(float('nan'))  # learning_rate is nan
""",
    "other transformations": r"""
ema_of_params(1.0)  # decay is 1\.0.* from 0 to below 1
ema_of_params(float('nan'))  # decay is nan.* from 0 to below 1
ema_of_params(True)  # decay is True.* from 0 to below 1
regularize(0.1)  # penalty is 0\.1; accepted is a function
direct_updates(3)  # tx is 3
accumulate_gradients(SGD, 0)  # accumulate_gradients: every is 0
accumulate_gradients(SGD, 2.0)  # every is 2\.0
accumulate_gradients(SGD, True)  # every is True
accumulate_gradients(3, 2)  # inner is 3
accumulate_gradients(lpmm_sgd, 2)  # inner is <function
accumulate_gradients(SGD, 2, jnp.int8)  # format is .* not a moment format
accumulate_gradients(SGD, 2, block_quantized(8, code='sqrt'))  # no negative values
accumulate_gradients(SGD, 2, block_quantized(8, code='float'))  # no negative values
accumulate_gradients(SGD, 2, block_quantized(8, code='log'))  # no negative values
accumulate_gradients(SGD, 2, block_quantized(8, relative_to='nu'))
    # no second moment to be relative to
""",
    "loss scales": r"""
static_scale(0.0)  # scale is 0\.0
static_scale(float('inf'))  # scale is inf
backoff_scale(factor=1.0)  # factor is 1\.0
backoff_scale(period=0)  # period is 0
backoff_scale(2.0, smallest=4.0)  # initial is 2\.0
log_normal_scale(overflow_probability=1.0)  # probability is 1\.0
log_normal_scale(decay=1.0)  # decay is 1\.0
log_normal_scale(least_deviation=-1.0)  # least_deviation is -1\.0
with_loss_scale(SGD, 1024.0)  # scaling is 1024
current_loss_scale(SGD.init(W))  # 0 loss scales
""",
    "quantised weights": r"""
quantize_params(W, bits=3)  # bits is 3; accepted are 4 to 16
quantize_params(W, bits=17)  # bits is 17
quantize_params(W, bits=12.0)  # bits is 12\.0
quantize_params(W, block_size=33)  # block_size is 33; accepted are the
quantize_params(W, rounding='up')  # rounding is 'up'
quantize_params(W, min_size=-1)  # min_size is -1
quantize_params(W, stacked='w')  # stacked is 'w'; accepted are None and
quantize_params({'a': {'b': W * 1j}})  # \['a'\]\['b'\] is complex64
quantize_params({'w': quantize_params(W)})  # \['w'\] is a QuantizedTensor
quantize_params({'w': 'x'})  # params\['w'\] is 'x', not an array
lpmm_sgd(0.1, momentum_bits=6)  # lpmm_sgd: momentum_bits is 6; accepted
lpmm_adam(0.1, momentum_bits=8.0)  # lpmm_adam: momentum_bits is 8\.0
lpmm_adam(0.1, block_size=48)  # lpmm_adam: block_size is 48; accepted are
lpmm_sgd(0.1, rounding='up')  # lpmm_sgd: rounding is 'up'
lpmm_adam(0.1, seed=1.5)  # seed is 1\.5
block_scale(W[:40], axis=-2, min_size=0)  # axis -2 of shape \[40, 64\]
block_scale({'w': W}, axis=2, min_size=0)  # has no axis 2
block_scale({'w': W}, axis=0.5)  # axis is 0\.5 for params\['w'\]
block_scale({'w': 0.5})  # params\['w'\] is 0\.5, not an array
block_scale(block_scale(W))  # is a BlockScaledTensor already
""",
    "starts, splits and plans": r"""
from_master(LOW, MASTER, None)  # dtype is None; accepted are floating
from_master(LOW, MASTER, {'bias': BF16})  # the structure of params
from_master(LOW, MASTER, jax.tree.map(lambda x: bool, MASTER))
    # bool for params\['bias'\], which .*; accepted are bf
from_master(LOW, {'w': 'x'})  # params\['w'\] is 'x', not an array
from_master(LOW, {'w': [1.0]}, BF16)  # \['w'\]\[0\] is 1\.0, not an array
master_weights(W, SGD.init(W))  # no LowbitState
split_array(W, F32, kahan())  # dtype is float32
split_array(W, None, kahan())  # dtype is .*accepted are floating
split_array(W, F16, extra_bits(16))  # takes 0 to 13 .*not 16
split_array(W[0] * 1j, BF16, kahan())  # complex64\[64\]; accepted are
split_array(W, BF16, kahan()) + jnp.complex64(1j)  # complex64
plan(MASTER, 1e9, optimizer=SGD)  # a function of the learning
plan(MASTER, 1e9, optimizer=lambda rate: rate)  # a function of the learn
plan(MASTER, 1e9, devices=0)  # devices is 0; accepted is an int from 1
plan(MASTER, 1e9, other_bytes=-1)  # other_bytes is -1; accepted
plan(MASTER, '80GB')  # device_bytes is '80GB'; accepted is a num
plan(MASTER, 80)  # device_bytes is 80; accepted is a number of bytes
from_master(SGD, MASTER)  # tx must be a transformation of this package
from_master(lpmm_adam(1e-3), MASTER)  # params\['kernel'\]: .*must be quantised.*params
lpmm_adam(1e-3).init(W.astype(BF16))  # bfloat16\[64, 64\].*must be quantised or float
plan({'w': 3}, 1e9)  # params\['w'\] is 3, not an array
plan(MASTER, 1e9)['adam']  # no formats 'adam'; there are float32, extra
""",
    "precision": r"""
jax.jit(native)(ALL_LOW)  # products="native" chooses dtypes
precision.apply(product, ALL_LOW, products='fp8')  # is 'fp8'; accepted are 'emulated'
precision.demote(PLAN, -0.1)  # ratio
precision.demote(PLAN, 1.1)  # ratio
precision.demote(PLAN, float('nan'))  # ratio
precision.demote(PLAN, True)  # ratio
precision.demote(PLAN, 0.5, order='largest')  # order is 'largest'.*decreasing
FloatFormat(1, 2)  # exponent_bits must be 2 to 8, got 1
FloatFormat(9, 2)  # exponent_bits must be 2 to 8, got 9
FloatFormat(4, 24)  # mantissa_bits must be 0 to 23
FloatFormat(4, 3.0)  # mantissa_bits must be an integer, got 3.0
FloatFormat(4, 3, 3.0)  # bias must be an integer, got 3.0
FloatFormat(4, 3, specials='fn')  # specials must be "none", "nan", "ieee"
FloatFormat(4, 3, overflow='wrap')  # overflow must be "saturate" or "inf
FloatFormat(8, 3, specials='none')  # -126 to 127; got -126 to 128
FloatFormat(8, 3, 1)  # -126 to 127; got -127 to 127
FloatFormat(4, 3, 121)  # -126 to 127; got -127 to -113
FloatFormat(4, 3, -120)  # -126 to 127; got 114 to 128
FloatFormat.of('int8')  # int8; accepted: float32, bfloat16
FloatFormat.of('float8_e8m0fnu')  # e8m0fnu; accepted: float32, bfloat16
FloatFormat(4, 3).round(jnp.arange(2))  # at most 32 bits, got int32
FloatFormat(4, 3).decode(NARROW)  # unsigned integers, got bfloat16
FloatFormat(4, 3).round(NARROW, NARROW)  # random must be uint32
precision.pack(NARROW, 12)  # float_format is 12, not a FloatFormat
precision.Formats('float8_e5m2', precision.FP32)  # FloatFormat
precision.trace(lambda w: w, W)  # accepted is a float scalar
precision.trace(lambda w: jnp.int32(1), W)  # accepted is a float scalar
precision.trace(lambda w: (w.sum(), w), W)  # accepted is a float scalar
""",
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
    "release.explain(jnp.sum, SGD, grad_dtype={})",
)
NO_FLOATS = ("jnp.int8", "jnp.complex64", "None", "'bfloat17'", "jnp.zeros_like", "{}")
REFUSED["dtypes"] = "\n".join(
    f"{code.replace('{}', dtype)}  # dtype is .*; accepted are floating"
    for code in TAKE_A_DTYPE
    for dtype in NO_FLOATS
)


def test_errors_say_what_was_given_and_what_is_accepted():
    """In one case, so that the quick run does not leave out any line."""
    for lines in REFUSED.values():
        for line in lines.replace("\n    #", "  #").strip().splitlines():
            code, message = line.split("  # ")
            with pytest.raises((TypeError, ValueError, KeyError), match=message):
                eval(code, PUBLIC | globals())
