"""Clipping by the global norm inside ``lowbit`` costs a reading of the gradients."""

import optax
import pytest

import lowbit_optax
from tools.gpu_program.steps import gpt2, lower_step

pytestmark = pytest.mark.usefixtures("by_triton")

CLIP = optax.clip_by_global_norm(1.0)
# As in docs/recipes.md: kernels, bytes moved and temporary bytes per parameter.
STEPS = {
    "inside": (
        lowbit_optax.lowbit(optax.chain(CLIP, optax.adamw(1e-3))), 46, 14.3, 0.0
    ),
    "before": (optax.chain(CLIP, lowbit_optax.lowbit_adamw(1e-3)), 46, 14.3, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("where", STEPS)
def test_what_clipping_costs_is_what_the_recipe_says(where):
    tx, kernels, moved, temporary = STEPS[where]
    model = gpt2()
    step = lower_step(tx, model | {"blocks": model["blocks"][:2]})
    assert len(step.launches) == pytest.approx(kernels, abs=0.1 * kernels)
    assert step.moved == pytest.approx(moved, abs=0.06)
    assert step.temporary == pytest.approx(temporary, abs=0.06)
