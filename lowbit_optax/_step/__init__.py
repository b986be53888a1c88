"""The engine: how one step of :func:`lowbit_optax.lowbit` runs.

``lowbit_optax.step`` and ``tx.update`` run these modules, in this order:

    stepper         finds the object behind a transformation, such as a Lowbit
    wrapped         traces optax's wrappers around it, if there are any
    engine          Lowbit.run: checks the arguments, runs the step, builds the state
    inner_update    traces the inner transformation on shapes
    run             chooses kernels or XLA for each leaf, and runs them
    plan, body      plan the fused kernels, and what each of them computes
    launches        groups leaves into launches, and runs them

A :class:`.step.Step` contains the checked arguments: a :class:`.leaf.StoredLeaf` for
each parameter, and a :class:`.moments.MomentPlan` for the inner state.
"""
