"""Every listed expression raises an error with the listed parts in its message."""

import re

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
    training,
    transformations,
)
from lowbit_optax.precision import FloatFormat

pytestmark = pytest.mark.standard_promotion

# Modules whose names the expressions below use, in addition to names of this file.
MODULES = [
    *(lowbit_optax, block_scaling, formats, loss_scaling, lpmm, reports),
    transformations,
]
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}
PUBLIC |= dict(emulation=emulation, training=training)
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
CHAINED = optax.chain(optax.clip(1.0), LOW)
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


# Each line has an expression and then the parts of the message, in any order.
REFUSED = {
    "weight formats": r"""
extra_bits(-1)  # bits  -1  bfloat16  0  16
extra_bits(22)  # bits  22  bfloat16  0  16
extra_bits(8.0)  # bits  8.0  static_args
extra_bits(True)  # bits  True  static_args
extra_bits(jnp.int32(8))  # bits  static_args
extra_bits(8, rounding='up')  # rounding  'up'  toward_zero
extra_bits(8, residual_rounding=None)
    # residual_rounding  'nearest'  'stochastic'  'toward_zero'
extra_bits(sum_rounding='up')  # sum_rounding  'up'  'nearest'
stochastic_rounding(sum_rounding='up')  # sum_rounding  'up'
stochastic_rounding(error_feedback=1)  # error_feedback  1
quantized_weights(error_feedback=1)  # error_feedback  1
kahan(rounding='toward_zero')  # rounding  'toward_zero'  'nearest'
kahan(residual_rounding='up')  # residual_rounding  'up'
kahan(arithmetic='bfloat16')  # arithmetic  'bfloat16'  'param'
kahan(float_format='bfloat16')  # float_format  FloatFormat  8
kahan(float_format=FloatFormat(8, 0))  # float_format  FloatFormat  8
nearest(float_format=FloatFormat(5, 10))  # float_format  FloatFormat
stochastic_rounding(float_format=FloatFormat(8, 8))  # float_format  FloatFormat
""",
    "moment formats": r"""
cast(F32)  # float32  bfloat16
cast(jnp.int8)  # int8  bfloat16
cast(None)  # dtype  None
cast(jnp.zeros_like)  # dtype  zeros_like
cast('float16', rounding='up')  # rounding  'up'  'nearest'
block_quantized(2)  # bits  2  4  8
block_quantized(8.0)  # bits  8.0
block_quantized(True)  # bits  True
block_quantized(code='log2')  # code  'log2'  None
block_quantized(block_size=48)  # block_size  48
block_quantized(block_size='32')  # block_size  '32'
block_quantized(rounding='up')  # rounding  'up'
block_quantized(6)  # bits  4  8  6
register_moments(3)  # state_class  3
register_moments(int)  # state_class  'int'  NamedTuple
register_moments(optax.TraceState, averages=('nu',))  # TraceState  'nu'
""",
    "lowbit": r"""
lowbit(optax.adamw)  # inner  optax.adamw(1e-3)
lowbit(SGD, implementation='gpu')  # implementation  'pallas'  'triton'  'mosaic'  'tpu'
kahan_sgd(0.1, implementation=1)  # implementation  1  None  'xla'  'pallas'
lowbit(SGD, seed=-1)  # seed  -1
lowbit(SGD, seed=2**32)  # seed  4294967296
lowbit(SGD, seed=1.5)  # seed  1.5  static_args
lowbit(SGD, min_size=-1)  # min_size  -1
lowbit(SGD, min_size='1')  # min_size  '1'  static_args
lowbit(SGD, weights='kahan')  # weights  'kahan'
lowbit(SGD, weights=kahan)  # weights  <function kahan
lowbit(SGD, weights=cast(BF16))  # weights  Cast
lowbit(SGD, moments=kahan())  # moments  KahanFormat
lowbit(SGD, moments='lower')  # moments  'lower'  'float32'
lowbit(SGD, moments={'mu': 8})  # moments  8  block_quantized
extra_bits_adamw(1e-3, bits=22)  # bits  22
lowbit_adamw(1e-3, b2=1.5)  # b2  1.5  0
lowbit_lion(1e-3, b1=-0.1)  # b1  -0.1  0
""",
    "parameters of a transformation": r"""
kahan_sgd(0.1).init({'w': 'text'})  # params['w']  'text'
kahan_sgd(0.1).init({'w': object()})  # params['w']  <object
kahan_sgd(0.1).init({'w': 1.0})  # params['w']  1.0
kahan_sgd(0.1).init({'w': W.astype(E4M3B11)})  # params['w']  float8_e4m3b11fnuz
lowbit(SGD, weights=nearest(float_format=TWELVE)).init(HALF)
    # float_format  params['w']  float16
lowbit(SGD, weights=stochastic_rounding(float_format=TWELVE)).init(HALF)
    # float_format  params['w']  float16
lowbit(SGD, weights=kahan(float_format=TWELVE)).init(HALF)
    # float_format  params['w']  float16
lowbit(SGD, weights=kahan()).init(BLOCKS)  # params['w']  extra_bits
lowbit(SGD, weights=extra_bits(21)).init(BLOCKS)  # params['w']  0  20  bits  21
lowbit(kahan_adamw(1e-3)).init(W)  # inner  kahan_adamw
lowbit(optax.chain(SGD, kahan_adamw(1e-3))).init(W)  # inner  kahan_adamw
lowbit(optax.lbfgs(), moments=block_quantized(8)).init(W)  # moments  float32
lowbit(ADAM, moments=block_quantized(8, code='sqrt')).init(W)
    # moments  code  'sqrt'  'mu'
lowbit(ADAM, moments=block_quantized(8, code='log')).init(W)
    # moments  code  'log'  'mu'
lowbit(ADAM, moments=block_quantized(8, code='float')).init(W)
    # moments  code  'float'  'mu'
lowbit(ADAM, moments={'nu': cast(BF16), 'trace': cast(F16)}).init(W)
    # 'trace'  'mu'  'nu'
lowbit(ADAM, moments={'nu': cast(BF16), 'trace': 'float32'}).init(W)
    # 'trace'  'mu'  'nu'
kahan_sgd(0.1, moments={'mu': cast(BF16)}).init(W)  # 'mu'  []
lowbit_muon(0.02, ns_dtype=F16)  # ns_dtype  float16
lowbit_muon(0.02, beta=None)  # beta  None
kahan_adamw(0.1, mask='w')  # mask  bools  'w'
extra_bits_adamw(0.1, mask=['w'])  # mask  bools  ['w']
lowbit_muon(0.02, is_matrix=lambda *_: True).init(MASTER)  # is_matrix  params['bias']
lowbit_muon(0.02).init({'c': W * 1j})  # params['c']  complex64[64, 64]  is_matrix
""",
    "arguments of another kind": r"""
memory_report(LOW, LOW.init(W))  # params  LowbitState
memory_report(MASTER, LOW)  # tx  dict  optax
explain(LOW, LOW.init(W))  # params  LowbitState
explain(MASTER, LOW)  # tx  dict  optax
step(MASTER, LOW, LOW.init(W), W)  # tx  dict  optax
step_report(MASTER, LOW, LOW.init(W), W)  # tx  dict  optax
convert(LOW, SGD, MASTER, LOW.init(MASTER))  # from_tx  dict  optax
with_master(MASTER, LOW)  # tx  dict  optax
with_master(LOW, {'w': 1.5})  # master['w']  array  1.5
state_shardings(MASTER, LOW, jax.P())  # tx  dict  optax
host_shardings(MASTER, LOW)  # tx  dict  optax
step_memory(MASTER, LOW, jnp.sum)  # tx  dict  optax
plan(1e9, MASTER)  # device_bytes  'bias'
lowbit_adamw(1e-3, weights=kahan())  # lowbit_adamw  weights  lowbit_optax.lowbit
kahan_adamw(1e-3, bits=8)  # kahan_adamw  bits  lowbit_optax.lowbit
from_master(LOW, MASTER, keep_float32=['b'])  # from_master  keep_float32  ['b']
memory_report(LOW, MASTER, dtype=BF16, keep_float32='b')  # keep_float32  'b'
memory_report(LOW, MASTER, stacked=['w'])  # stacked  ['w']
lowbit_muon(0.02, is_matrix=['w'])  # is_matrix  ['w']
training.nnx_optimizer(MASTER, LOW)  # model  nnx  'bias'
training.TrainState.create(apply_fn=None, params=LOW, tx=MASTER)  # tx  dict
step(lowbit(ADAM), W, EMA.init(W), W)  # EmaOfParamsState  ScaleByAdamState
step(lowbit(ADAM, moments='float32'), W, EMA.init(W), W)
    # EmaOfParamsState  ScaleByAdamState
step(SUMS, W, EMA.init(W), W)  # LowbitState  AccumulationState
with_loss_scale(MASTER, static_scale())  # inner  dict  optax
with_loss_scale(SGD, static_scale()).update(W, SGD.init(W), W)  # LossScaleState
with_loss_scale(optax.chain(SCALED), static_scale()).init(W)  # inner  with_loss_scale
accumulate_gradients(SGD, 2).update(MASTER, IN_FLOAT32.init(MASTER), MASTER)
    # params['kernel']
scaled_value_and_grad(lambda w: jnp.sum(w['w']))(HALF, SCALED.init(HALF))
    # scaled_value_and_grad  float16  astype(jnp.float32)
release.value_and_update(lambda w: jnp.sum(w['w']), SCALED)(HALF, SCALED.init(HALF))
    # release  float16  astype(jnp.float32)
lowbit_muon(0.1, beta=1.0)  # lowbit_muon  beta  1.0
lowbit_adamw(1e-3, b1=F32.dtype.type(1.5))  # lowbit_adamw  b1  1.5
release.value_and_update(jnp.sum, SGD, max_grad_norm=0.0)  # max_grad_norm  0.0
release.value_and_update(jnp.sum, SGD, max_grad_norm=-1.0)  # max_grad_norm  -1.0
release.value_and_update(jnp.sum, SGD, max_grad_norm='1')  # max_grad_norm  '1'
release.value_and_update(jnp.sum, SGD, max_grad_norm=True)  # max_grad_norm  True
release.value_and_update(jnp.sum, SGD, state_memory='host')
    # state_memory  'pinned_host'  'host'
""",
    "states of other transformations and parameters": r"""
step(CHAINED, MASTER, LOW.init(MASTER), MASTER)  # LowbitState  EmptyState
step(MULTI_STEPS, MASTER, LOW.init(MASTER), MASTER)  # MultiStepsState  LowbitState
step(SGD, MASTER, LOW.init(MASTER), MASTER)  # EmptyState  LowbitState
convert(MASTER, LOW.init(MASTER), CHAINED, LOW)  # from_tx  LowbitState  EmptyState
convert(MASTER, LOW.init(MASTER), ADAM, LOW)  # from_tx  LowbitState
convert(MASTER, CHAINED.init(MASTER), LOW, ADAM)  # from_tx  LowbitState  tuple
step(LOW, {'w': NARROW_W['w'][:8]}, LOW.init(NARROW_W), {'w': NARROW_W['w'][:8]})
    # params['w']  shape
step(lowbit(ADAM), W[0, :8], lowbit(ADAM).init(W[0]), W[0, :8])
    # moment  shape
master_weights(NARROW_W['w'], LOW.init(NARROW_W))  # params['w']  paths
""",
    "shardings": r"""
state_shardings(LOW, NARROW_W, {'w': 'x'}, mesh=MESH)  # params['w']  'x'  NamedSharding
state_shardings(LOW, NARROW_W, {'w': None}, mesh=MESH)  # params['w']  None
state_shardings(LOW, NARROW_W, {}, mesh=MESH)  # structure  params
state_shardings(LOW, NARROW_W, jax.P(None, None, 'x'), mesh=MESH)  # params['w']  2
state_shardings(LOW, NARROW_W, jax.P(None, 'x'), mesh=MESH)  # 1  params['w']  8
state_shardings(LOW, NARROW_W, jax.P('x'))  # params['w']  jax.set_mesh
state_shardings(LOW, {}, jax.P(), uneven='pad')  # uneven  'other_axis'  'replicate'
stepped(kahan_sgd(1, param_shardings=jax.P('x')))  # param_shardings  PartitionSpec
stepped(kahan_sgd(1, param_shardings='x'))  # param_shardings  'x'
stepped(kahan_sgd(1.0, param_shardings={'v': PLACE}))
    # param_shardings  structure  params
stepped(kahan_sgd(1.0, param_shardings=PLACE))  # param_shardings  params['w']  2
""",
    "gradients and states of quantised weights": r"""
lpmm_update(jnp.ones((64, 65)))  # params['w']  (64, 65)
lpmm_update(jnp.ones((64, 64), jnp.int32))  # params['w']  int32
lpmm_update(QUANTIZED['w'])  # params['w']  QuantizedTensor
lpmm_update(1.0)  # params['w']  1.0
lpmm_update(jnp.ones((64, 65)), SUMS)  # params['w']  (64, 65)
lpmm_update(jnp.ones((64, 64), jnp.int32), SUMS)  # params['w']  int32
lpmm_update(QUANTIZED['w'], SUMS)  # params['w']  QuantizedTensor
lpmm_update(1.0, SUMS)  # params['w']  1.0
lpmm_update(W, lpmm_sgd(0.1, 0.9), lpmm_sgd(0.1, 0.9, block_size=32))
    # params['w']  block_size  2048
dequantize({'w': jax.tree.map(lambda x: x[:1], QUANTIZED['w'])})  # params['w']  8-bit
lpmm_sgd(0.1).init({'w': jax.tree.map(lambda x: x[:1], QUANTIZED['w'])})
    # params['w']  8-bit
CUT_BLOCKS['w'].dequantize()  # [2, 64]  [32, 64]
lowbit(SGD).init(CUT_BLOCKS)  # params['w']  [2, 64]
stepped(lowbit(SGD), BLOCKS)  # params['w']  BlockScaledTensor
""",
    "errors into a moment": r"""
stepped(lowbit(optax.contrib.muon(1e-3), weights=FED))  # error_feedback  'w'
stepped(lowbit(optax.lion(1e-3), weights=FED))  # error_feedback
stepped(lowbit(optax.chain(ADAM, optax.clip(1.0)), weights=FED))  # error_feedback
stepped(lowbit(optax.sgd(1e-3, momentum=0.9), weights=FED))
    # momentum  error_feedback  float32  params['w']
stepped(sr_sgd(1e-3, error_feedback='trace'))  # error_feedback  float32  params['w']
stepped(lowbit(optax.adam(1e-3, mu_dtype=BF16), weights=FED, moments='float32'))
    # error_feedback  float32  moment
stepped(lowbit(optax.masked(ADAM, {'w': False}), weights=FED))
    # error_feedback  float32
stepped(lowbit(optax.chain(ADAM, ADAM), weights=FED))  # error_feedback
stepped(lowbit(optax.apply_if_finite(MULTI_STEPS, 3), weights=FED))  # error_feedback
""",
    "release": r"""
released(lambda w: w[0])  # (64,)
released(lambda w: jnp.int32(1))  # int32
released(lambda w: jax.lax.complex(1.0, 1.0))  # complex64
released(lambda w: (w.sum(), w))  # has_aux
released(jnp.sum, has_aux=True)  # has_aux
released(lambda w: (w.sum(), w, w), has_aux=True)  # has_aux
released(lambda w: [w.sum(), w], has_aux=True)  # has_aux
released(lambda w: None)  # None
released(jnp.sum, params={'rate': 1.0})  # params['rate']
released(jnp.sum, params={'rate': 3})  # params['rate']
released(jnp.sum, params={'rate': 'text'})  # params['rate']
released(jnp.sum, optax.lbfgs())  # 'value'
released(jnp.sum, optax.polyak_sgd())  # 'value'
released(jnp.sum, optax.chain(SCALED))  # state[0]
released(SGD, jnp.sum)  # tx  optax  <function
release.value_and_update(jnp.sum, SCALED)(W, LOW.init(W))  # LowbitState  LossScaleState
""",
    "the 16-bit unit": r"""
emulation.sixteen_bit_adamw(0.1, b2=0.999)  # b2  0.999  1
emulation.sixteen_bit_adamw(0.1, b1=0.999)  # b1  0.999  1
emulation.sixteen_bit_adamw(0.1, dtype=F16)  # 6.0e-08
emulation.sixteen_bit_adamw(0.1, eps=0.0)  # eps  0.0
emulation.sixteen_bit_sgd(0.1, rounding='up')  # rounding  'up'  'kahan'
emulation.sixteen_bit_sgd(0.1, dtype=F32)  # dtype  float32
emulation.sixteen_bit_sgd(0.1).init(MASTER)  # sixteen_bit_sgd  params['bias']  float32
emulation.sixteen_bit_sgd(0.1, dtype=F16).init(NARROW_W)  # params['w']  bfloat16
emulation.sixteen_bit_sgd(float('nan'))  # learning_rate  nan
""",
    "other transformations": r"""
ema_of_params(1.0)  # 1.0  0  1
ema_of_params(float('nan'))  # nan  0  1
ema_of_params(True)  # True  0  1
regularize(0.1)  # penalty  0.1
direct_updates(3)  # tx  3
accumulate_gradients(SGD, 0)  # accumulate_gradients  every  0
accumulate_gradients(SGD, 2.0)  # every  2.0
accumulate_gradients(SGD, True)  # every  True
accumulate_gradients(3, 2)  # inner  3
accumulate_gradients(lpmm_sgd, 2)  # inner  <function
accumulate_gradients(SGD, 2, jnp.int8)  # format  int8
accumulate_gradients(SGD, 2, block_quantized(8, code='sqrt'))  # code
accumulate_gradients(SGD, 2, block_quantized(8, code='float'))  # code
accumulate_gradients(SGD, 2, block_quantized(8, code='log'))  # code
""",
    "loss scales": r"""
static_scale(0.0)  # scale  0.0
static_scale(float('inf'))  # scale  inf
backoff_scale(factor=1.0)  # factor  1.0
backoff_scale(period=0)  # period  0
backoff_scale(2.0, smallest=4.0)  # initial  2.0  4.0
log_normal_scale(overflow_probability=1.0)  # overflow_probability  1.0
log_normal_scale(decay=1.0)  # decay  1.0
log_normal_scale(least_deviation=-1.0)  # least_deviation  -1.0
with_loss_scale(SGD, 1024.0)  # scaling  1024.0
current_loss_scale(SGD.init(W))  # 0  loss
""",
    "quantised weights": r"""
quantize_params(W, bits=3)  # bits  3  4  16
quantize_params(W, bits=17)  # bits  17
quantize_params(W, bits=12.0)  # bits  12.0
quantize_params(W, block_size=33)  # block_size  33
quantize_params(W, rounding='up')  # rounding  'up'
quantize_params(W, min_size=-1)  # min_size  -1
quantize_params(W, stacked='w')  # stacked  'w'  None
quantize_params({'a': {'b': W * 1j}})  # params['a']['b']  complex64
quantize_params({'w': quantize_params(W)})  # params['w']  QuantizedTensor
quantize_params({'w': 'x'})  # params['w']  'x'
lpmm_sgd(0.1, momentum_bits=6)  # momentum_bits  lpmm_sgd  6
lpmm_adam(0.1, momentum_bits=8.0)  # momentum_bits  lpmm_adam  8.0
lpmm_adam(0.1, block_size=48)  # block_size  lpmm_adam  48
lpmm_sgd(0.1, rounding='up')  # rounding  lpmm_sgd  'up'
lpmm_adam(0.1, seed=1.5)  # seed  1.5
block_scale(W[:40], axis=-2, min_size=0)  # axis  -2  [40, 64]
block_scale({'w': W}, axis=2, min_size=0)  # axis  2
block_scale({'w': W}, axis=0.5)  # axis  0.5  params['w']
block_scale({'w': 0.5})  # params['w']  0.5
block_scale(block_scale(W))  # params  BlockScaledTensor
""",
    "starts, splits and plans": r"""
from_master(LOW, MASTER, {'bias': BF16})  # dtype  structure  params
from_master(LOW, MASTER, jax.tree.map(lambda x: bool, MASTER))  # bool  params['bias']
from_master(LOW, {'w': 'x'})  # params['w']  'x'
from_master(LOW, {'w': [1.0]}, BF16)  # params['w'][0]  1.0
master_weights(NARROW_W, SGD.init(NARROW_W))  # LowbitState  state  params['w']
split_array(W, F32, kahan())  # dtype  float32
split_array(W, BF16, cast(BF16))  # weight_format  Cast
join_array(W)  # split  SplitArray
split_array(W, None, kahan())  # dtype  None
split_array(W, BF16, kahan(), seed=-1)  # split_array  seed  -1
split_array(W, BF16, quantized_weights())  # split_array  weight_format
split_array(W, F16, extra_bits(16))  # 0  13  16
split_array(W[0] * 1j, BF16, kahan())  # complex64[64]
split_array(W, BF16, kahan()) + jnp.complex64(1j)  # SplitArray  complex64
plan(MASTER, 1e9, optimizer=SGD)  # optimizer  function
plan(MASTER, 1e9, optimizer=lambda rate: rate)  # optimizer  function
plan(MASTER, 1e9, devices=0)  # devices  0
plan(MASTER, 1e9, other_bytes=-1)  # other_bytes  -1
plan(MASTER, '80GB')  # device_bytes  '80GB'
plan(MASTER, 80)  # device_bytes  80
from_master(SGD, MASTER, BF16)  # tx  transformation  params['kernel']
from_master(MASTER, LOW)  # tx  dict  optax
from_master(lpmm_adam(1e-3), MASTER)  # params['kernel']  quantize_params
lpmm_adam(1e-3).init(W.astype(BF16))  # bfloat16[64, 64]  quantize_params
plan({'w': 3}, 1e9)  # params['w']  3
plan(MASTER, 1e9)['adam']  # 'adam'  float32
""",
    "precision": r"""
jax.jit(native)(ALL_LOW)  # products="native"
precision.apply(product, ALL_LOW, products='fp8')  # products  'fp8'  'emulated'
precision.demote(PLAN, -0.1)  # ratio  -0.1
precision.demote(PLAN, 1.1)  # ratio  1.1
precision.demote(PLAN, float('nan'))  # ratio  nan
precision.demote(PLAN, True)  # ratio  True
precision.demote(PLAN, 0.5, order='largest')  # order  'largest'
FloatFormat(1, 2)  # exponent_bits  2  8  1
FloatFormat(9, 2)  # exponent_bits  2  8  9
FloatFormat(4, 24)  # mantissa_bits  0  23
FloatFormat(4, 3.0)  # mantissa_bits  3.0
FloatFormat(4, 3, 3.0)  # bias  3.0
FloatFormat(4, 3, specials='fn')  # specials  "none"  "nan"  "ieee"
FloatFormat(4, 3, overflow='wrap')  # overflow  "saturate"  "infinity"
FloatFormat(8, 3, specials='none')  # -126  127  128
FloatFormat(8, 3, 1)  # -126  127  -127
FloatFormat(4, 3, 121)  # -126  127  -127  -113
FloatFormat(4, 3, -120)  # -126  127  114  128
FloatFormat.of('int8')  # int8  float32  bfloat16
FloatFormat.of('float8_e8m0fnu')  # float8_e8m0fnu  float32  bfloat16
FloatFormat(4, 3).round(jnp.arange(2))  # 32  bits  int32
FloatFormat(4, 3).decode(NARROW)  # bfloat16
FloatFormat(4, 3).round(NARROW, NARROW)  # random  uint32  bfloat16
precision.pack(NARROW, 12)  # float_format  12  FloatFormat
precision.Formats('float8_e5m2', precision.FP32)  # low  'float8_e5m2'  FloatFormat
precision.trace(lambda w: w, W)  # loss  (64, 64)
precision.trace(lambda w: jnp.int32(1), W)  # loss  int32
precision.trace(lambda w: (w.sum(), w), W)  # loss  has_aux
""",
}
WITH_A_DTYPE = (
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
    f"{code.replace('{}', dtype)}  # dtype  bfloat16"
    for code in WITH_A_DTYPE
    for dtype in NO_FLOATS
    if (code, dtype) != (WITH_A_DTYPE[0], "None")  # the default of from_master
)


def test_errors_name_the_argument_and_its_value():
    """Uses a single case, so that the quick run does not leave out any line."""
    for lines in REFUSED.values():
        for line in lines.replace("\n    #", "  #").strip().splitlines():
            code, _, parts = line.partition("  # ")
            with pytest.raises((TypeError, ValueError, KeyError)) as error:
                eval(code, PUBLIC | globals())
            for part in parts.split("  "):
                # 3 is not a part of 32 or of 0.3.
                before = r"(?<![\w.-])" if part[0].isdigit() else r"(?<!\w)"
                whole = rf"{before}{re.escape(part)}(?!\w)"
                assert re.search(whole, str(error.value)), (code, part)
            # Arrays and parameters in a message would hide what it says.
            assert len(str(error.value)) < 1000, code
