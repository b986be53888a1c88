"""The loop, checkpoints and meshes of Tunix's ``PeftTrainer``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lowbit_optax.training import cast_model
from tests.helpers.nnx_network import Network, error_of, mesh_of
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.side_by_side import (
    LEARNING_RATE,
    OURS,
    STEPS,
    batches,
    compare,
    note_restored,
)

peft_trainer = pytest.importorskip("tunix.sft.peft_trainer", exc_type=ImportError)
import orbax.checkpoint as ocp  # noqa: E402  (Tunix needs it)
from tunix.utils import compat  # noqa: E402

# The devices of the resumed run, and the label of the case in the record.
WHERE = {2: "2 to 2", 4: "2 to 4"}


@nnx.jit
def _made():
    """A model whose parameters are placed on the mesh by their annotations."""
    model = Network("fsdp")
    state = nnx.state(model)
    specs = nnx.get_partition_spec(state)
    nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
    return model


def _trained(tx, dtype, steps, folder=None, devices=1):
    """A trainer after ``steps``, resumed from a checkpoint in ``folder`` if any."""
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=10_000,
        max_steps=steps,
        checkpoint_root_directory=folder and str(folder),
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_interval_steps=STEPS // 2, max_to_keep=4
        ),
    )
    data = [
        peft_trainer.TrainingInput(input_tokens=inputs, input_mask=targets)
        for inputs, targets in zip(*(x[:-1] for x in batches()), strict=True)
    ]
    mesh = mesh_of(devices, "fsdp")
    with compat.set_mesh(mesh), mesh:
        model = _made()
        if dtype == jnp.bfloat16:
            tx = cast_model(model, tx)
        trainer = peft_trainer.PeftTrainer(model, tx, config)
        trainer = trainer.with_loss_fn(error_of).with_gen_model_input_fn(
            lambda x: {"inputs": x.input_tokens, "targets": x.input_mask}
        )
        trainer.train(data)
    return trainer


def _run(tx, dtype):
    trainer = _trained(tx, dtype, STEPS)
    loss = error_of(trainer.model, *(x[-1] for x in batches()))
    state = nnx.state(trainer.optimizer, nnx.OptState)
    return loss, nnx.state(trainer.model, nnx.Param), state


def test_it_trains_like_float32():
    compare("Tunix PeftTrainer", "google-tunix", _run)


@pytest.mark.parametrize("devices", WHERE)
@pytest.mark.parametrize("name", OURS)
def test_a_restored_run_continues_as_if_it_had_not_stopped(name, devices, tmp_path):
    """Bits match on the same number of devices; other numbers sum in another order."""
    tx = OURS[name](LEARNING_RATE)
    whole = _trained(tx, jnp.bfloat16, STEPS, devices=2)
    _trained(tx, jnp.bfloat16, STEPS // 2, tmp_path, devices=2)
    resumed = _trained(tx, jnp.bfloat16, STEPS, tmp_path, devices)
    end = lambda x: nnx.to_pure_dict(nnx.state((x.model, x.optimizer)))
    if devices == 2:
        assert_same_bits(end(resumed), end(whole))
    held_out = [x[-1] for x in batches()]
    losses = [error_of(x.model, *held_out) for x in (whole, resumed)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    note_restored("Tunix PeftTrainer", name, WHERE[devices])
