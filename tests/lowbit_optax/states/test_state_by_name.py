"""Arrays of a state by their names, and beside trees like the parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optaxs_tests import ADAMW, ALIASES, alias


@pytest.mark.parametrize("name", [name for name in ALIASES if ALIASES[name] is ADAMW])
def test_arrays_of_the_state_are_found_by_name(name):
    params = {"w": jnp.ones((4, 32), jnp.bfloat16), "b": jnp.ones(8), "none": None}
    state = jax.eval_shape(alias(name)(**ADAMW).init, params)
    for field in ("mu", "nu"):
        assert len(optax.tree.get_all_with_path(state, field)) == 1
    # Two counts: the steps, by which roundings draw their bits, and Adam's.
    with pytest.raises(KeyError, match="multiple"):
        optax.tree.get(state, "count")
    assert optax.tree.get(state.inner_state, "count").shape == ()
