"""The step at which a run diverges, and the steps at which tensors overflow."""

import numpy as np
import pytest

from benchmarks.papers import overflow_spikes

pytestmark = pytest.mark.standard_promotion


def test_training_diverges_at_the_first_of_the_steps_with_a_high_loss():
    loss = np.r_[np.full(20, 2.3), np.full(50, 0.5), np.full(60, 2.3)]
    # From step 63 on, at least 9 of 16 steps have a high loss.
    high = next(i for i in range(55, 80) if loss[i : i + 16].mean() > 1.5)
    assert overflow_spikes.divergence(loss) == high == 63
    assert overflow_spikes.divergence(loss[:70]) is None
    assert overflow_spikes.divergence(np.full(40, 2.3)) == 0


def test_tensors_are_in_the_order_in_which_they_overflow():
    overflow = np.zeros((9, 4))
    overflow[6:, 0], overflow[2, 1], overflow[4:, 3] = 0.5, 0.02, 0.05
    assert list(overflow_spikes.onsets(overflow, 0.01).items()) == [
        (1, 2),
        (3, 4),
        (0, 6),
    ]
    assert overflow_spikes.onsets(overflow, 0.1) == {0: 6}
    loss = np.r_[np.full(4, 2.3), np.full(20, 0.4), np.full(40, 2.3)]
    ratios = np.r_[overflow, np.tile(overflow[-1], (55, 1))]
    run = overflow_spikes.Run(loss, ratios)
    found = overflow_spikes.summary([run, run], list("abcd"))
    end = overflow_spikes.divergence(loss)
    assert found["diverged"] == 2
    assert found["first"] == ["b", "b"]
    means = [found["from 1%"][k]["mean"] for k in "123"]
    assert means == [end - 2, end - 4, end - 6]
    assert found["from 10%"]["mean"] == end - 6
    assert found["from the lowest loss"]["mean"] == end - 4
