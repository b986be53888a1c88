"""The GPT trains the same with and without release; and what it prints."""

import argparse
import pathlib

import chex
import jax
import numpy as np
import pytest
from released import OPERATION_BY_OPERATION

from benchmarks.training import gpt_release
from benchmarks.training.text import gpt_flags, stdlib_text

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]

TINY = [
    *("--layers", "3", "--width", "64", "--heads", "2", "--context", "16"),
    *("--batch-size", "2", "--steps", "4", "--optimizer", "adamw"),
]


def trained(argv: list[str], released: bool):
    """Losses and last parameters of four steps."""
    args = gpt_flags.parse_args([*TINY, *argv])
    choice = gpt_flags.OPTIMIZERS[args.optimizer]
    model = gpt_release.make_model(args)
    tx = choice.build(1e-3, 0)
    step = jax.jit(
        gpt_release.make_step(model.loss, tx, released, args.max_grad_norm),
        donate_argnums=(0, 1),
        compiler_options=OPERATION_BY_OPERATION,
    )
    params = choice.store(model.init(jax.random.key(0)))
    state = tx.init(params)
    text, losses = stdlib_text.load().train, []
    for number in range(4):
        batch = stdlib_text.random_windows(text, (0, number), 2, 17)
        loss, params, state = step(params, state, batch)
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize(
    ("argv", "tolerance"),
    [
        # The norm's squares are added up in another order.
        ("--optimizer adamw --remat dots --max-grad-norm 0.5", 1e-6),
        ("--optimizer kahan_adamw --remat none", 0),
    ],
)
def test_training_is_the_same_with_and_without_release(argv, tolerance):
    with_release, new = trained(argv.split(), released=True)
    without, want = trained(argv.split(), released=False)
    np.testing.assert_allclose(with_release, without, rtol=tolerance)
    chex.assert_trees_all_close(new, want, rtol=0, atol=20 * tolerance)
    assert len(set(without)) == 4


def test_the_end_says_where_parameters_are_updated_and_in_what_memory(capsys):
    result = gpt_release.main(TINY)
    printed = capsys.readouterr().out
    assert "adamw with release: training loss" in printed
    assert len(result.losses) == 4
    assert list(result.memory) == ["without release", "with release"]
    for name, memory in result.memory.items():
        assert name in printed
        held = memory.arguments + memory.outputs - memory.aliased
        assert memory.peak == held + memory.temporary
        assert f"{memory.peak / 2**20:.2f}" in printed
    assert result.updates["['layers']['up']"] == "in the loop"
    # The embedding is the head too.
    assert result.updates["['embedding']"].startswith("in the backward pass")
    assert all(name in printed for name in result.updates)


@pytest.mark.parametrize("optimizer", ["extra_bits_adamw", "lowbit_lion", "lpmm_adam"])
def test_optimizers_take_the_model_they_store(optimizer):
    choice = gpt_flags.OPTIMIZERS[optimizer]
    model = gpt_release.make_model(gpt_flags.parse_args(TINY))
    tx = choice.build(1e-3, 0)
    step = gpt_release.make_step(model.loss, tx, released=True)

    def steps(tokens):
        params = choice.store(model.init(jax.random.key(0)))
        state = tx.init(params)
        return (params, state), step(params, state, tokens)

    tokens = jax.ShapeDtypeStruct((2, 17), np.int32)
    given, (loss, *new) = jax.eval_shape(steps, tokens)
    assert loss.shape == ()
    chex.assert_trees_all_equal_shapes_and_dtypes(tuple(new), given)


def test_text_is_the_standard_librarys_modules_of_which_a_tenth_is_held_out():
    text = stdlib_text.load()
    whole = b"".join(part.tobytes() for part in text)
    assert pathlib.Path(argparse.__file__).read_bytes() in whole
    assert len(text.held_out) == len(whole) // 10


def test_batches_depend_on_seed_and_step_alone():
    text = stdlib_text.load().train
    draw = lambda *seed: stdlib_text.random_windows(text, seed, 4, 9)
    assert draw(0, 1).shape == (4, 9)
    assert np.array_equal(draw(0, 1), draw(0, 1))
    assert not np.array_equal(draw(0, 1), draw(0, 2))
    assert not np.array_equal(draw(0, 1), draw(1, 1))


def test_windows_for_evaluation_reach_both_ends():
    text = np.arange(100, dtype=np.uint8)
    windows = stdlib_text.even_windows(text, 5, 10)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 99


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--width 30 --heads 4", "does not divide"),
        ("--steps 0", "less than 1"),
        ("--learning-rate nan", "nan is not a finite number"),
    ],
)
def test_flags_that_make_no_model_are_errors(argv, message, capsys):
    with pytest.raises(SystemExit):
        gpt_flags.parse_args(argv.split())
    assert message in capsys.readouterr().err
