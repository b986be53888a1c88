"""Where in an optimizer's state ``lowbit`` keeps its own, whatever stands around it.

Only optax's wrappers know how they nest states. So ``init`` of the whole transformation
is asked, in a context in which ``lowbit`` answers by a :class:`Recorded`:

    chain(clip, masked(lowbit(adamw)))   -->   (EmptyState, MaskedState(Recorded))
"""

import dataclasses
import typing
from collections.abc import Mapping

import jax
import optax

from lowbit_optax._step import context, trees
from lowbit_optax._step.engine import Lowbit
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax._step.moments import MomentPlan


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """What one ``lowbit`` was asked to make a state for; a pytree without leaves.

    Args:
      config: the arguments of ``lowbit``.
      names, treedef: of the parameters that its wrappers hand to it.
    """

    config: Lowbit
    names: list[str]
    treedef: trees.PyTreeDef

    @classmethod
    def of(cls, config: Lowbit, params) -> "Recorded":
        """What ``init`` is asked."""
        names, _, treedef = trees.named_leaves(params)
        return cls(config, names, treedef)

    def leaves(self, what: str, by_name: Mapping[str, typing.Any]) -> list[StoredLeaf]:
        """The leaves that were handed to ``lowbit``, without residuals.

        Args:
          what: the transformation's name, for the error.
          by_name: all parameters.

        Raises:
          ValueError: if a wrapper hands on others, as ``optax.flatten`` does, or if
            the weight format cannot hold one.
        """
        unknown = [name for name in self.names if name not in by_name]
        if unknown:
            raise ValueError(
                f"{what} hands params{unknown[0]} to lowbit, which params do not have; "
                "accepted are wrappers that keep the structure of params"
            )
        return self.config.leaves(self.names, [by_name[name] for name in self.names])

    def plan(self, leaves: list[StoredLeaf]) -> MomentPlan:
        """How the state of the inner transformation is stored."""
        return self.config.plan_of(leaves, self.treedef)


jax.tree_util.register_pytree_node(
    Recorded, lambda x: ((), x), lambda recorded, _: recorded
)


def recorded_state(tx: optax.GradientTransformation, params) -> typing.Any:
    """``tx.init``'s state as shapes, with a :class:`Recorded` for every LowbitState.

    Args:
      tx: any optax transformation.
      params: tree of arrays or ShapeDtypeStructs.
    """
    with context.starting(Recorded.of):
        # Not tx.init itself, whose result JAX may know from outside of this context.
        return jax.eval_shape(lambda params: tx.init(params), trees.abstract(params))


def is_recorded(x) -> bool:
    """Whether ``x`` is a :class:`Recorded`; for ``is_leaf`` of JAX's tree functions."""
    return isinstance(x, Recorded)
