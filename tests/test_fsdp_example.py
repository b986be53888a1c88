"""The FSDP example shards weights and state, and trains."""

import pathlib
import re
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import fsdp  # noqa: E402

pytestmark = [pytest.mark.example, pytest.mark.standard_promotion]


def test_each_device_holds_an_eighth_of_the_matrices_and_the_loss_falls(capsys):
    losses = fsdp.main(["--steps", "12", "--learning-rate", "1e-2"])
    assert losses[-1] < losses[0] - 0.5
    found = re.search(r"holds ([\d.]+) of ([\d.]+) MiB", capsys.readouterr().out)
    held, whole = map(float, found.groups())
    # Scales of norms are whole on each device.
    assert whole / 8 < held < whole / 8 + 0.05


def test_a_batch_that_does_not_divide_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(fsdp, "BATCH_SIZE", 12)
    with pytest.raises(SystemExit):
        fsdp.main([])
    assert "12 examples do not divide into 8 devices" in capsys.readouterr().err
