"""JAX lowers a model's kernels once for equal leaves, and they have few texts."""

import re

import jax
import jax.numpy as jnp
import pytest

import lowbit_optax
from benchmarks.leaf_sets import gpt2, resnet50
from pallas_kernels import platforms
from tools.gpu_program.steps import lower_step

LORA = ((768, 16), (16, 768), (768, 16), (16, 3072)) * 32
MODELS = {"gpt2": gpt2().shapes, "resnet50": resnet50().shapes, "lora": LORA}
CALL = r'@(?:__gpu\$xla\.gpu\.triton|mosaic_gpu_v2)\(.*?(?:ir|module) = "([^"]*)"'

# The numbers of lowered kernels and of different texts; XLA compiles each text once.
COUNTS = {
    ("triton", "gpt2", "kahan_adamw"): (8, 5),
    ("triton", "gpt2", "lowbit_adamw"): (8, 5),
    ("triton", "resnet50", "kahan_adamw"): (17, 3),
    ("triton", "resnet50", "lowbit_adamw"): (17, 5),
    ("triton", "lora", "kahan_adamw"): (3, 3),
    ("triton", "lora", "lowbit_adamw"): (4, 2),
    ("mosaic", "gpt2", "kahan_adamw"): (8, 8),
    ("mosaic", "gpt2", "lowbit_adamw"): (8, 8),
    ("mosaic", "lora", "lowbit_adamw"): (4, 3),
}


@pytest.mark.parametrize(("launcher", "model", "name"), COUNTS, indirect=["launcher"])
def test_kernels_of_a_model_have_few_texts(launcher, model, name):
    if launcher == "mosaic" and not platforms.has_mosaic():
        pytest.skip("Mosaic GPU needs JAX 0.11 or newer")
    tx = getattr(lowbit_optax, name)(1e-3)
    leaves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in MODELS[model]]
    texts = re.findall(CALL, lower_step(tx, leaves).lowered.as_text())
    assert (len(texts), len(set(texts))) == COUNTS[launcher, model, name]
