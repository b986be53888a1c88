"""The programs on ``docs/integrations.md`` run, and keep the low bits of the weights.

Doctests run the programs of flax, nnx and equinox. Tunix's needs a model of the reader.
"""

import re
import textwrap

import jax
import numpy as np
import pytest

import lowbit_optax
from tests.helpers.places import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text()
TABS = dict(
    re.findall(r'^=== "([^"]*)"\n\n    ```python\n(.*?)^    ```', PAGE, re.M | re.S)
)
LIBRARIES = {
    "haiku": "haiku",
    "Keras": "keras",
    "NumPyro": "numpyro",
    "optimistix": "optimistix",
    "jaxopt": "jaxopt",
    "haliax, Levanter": "haliax.quantization",
}


def _lowbit_states(tree):
    is_state = lambda x: isinstance(x, lowbit_optax.LowbitState)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def test_each_tab_with_a_complete_program_is_run():
    assert TABS.keys() == {*LIBRARIES, "Tunix"}


@pytest.mark.parametrize("tab", LIBRARIES)
def test_the_program_runs_and_keeps_the_low_bits(tab, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(LIBRARIES[tab], exc_type=ImportError)
    program, names = textwrap.dedent(TABS[tab]), {}
    # With a learning rate of zero, the state still has the initial residuals.
    exec(program.replace("1e-3", "0.0"), names)
    (state,) = _lowbit_states([names.get("state"), names.get("found")])
    tx = lowbit_optax.lowbit_adamw(0.0)
    _, expected = lowbit_optax.from_master(tx, names["masters"])
    got, expected = (jax.tree.leaves(x.residual.tree) for x in (state, expected))
    assert len(got) == len(expected)
    assert all(map(np.array_equal, got, expected))
