"""Optax's own tests, from the installed optax, for the aliases of this package.

The wheel of optax contains its tests. The functions below run the bodies of these tests
with this package's aliases instead of optax's.
"""

import functools
import importlib
import os
import types
import unittest
import warnings

import jax
import optax
import pytest

import lowbit_optax

SGD = {"learning_rate": 1e-3, "momentum": 0.9}
ADAMW = {"learning_rate": 1e-1}
ALIASES = {
    "kahan_sgd": SGD,
    "sr_sgd": SGD,
    "extra_bits_sgd": SGD,
    "lowbit_sgd": SGD,
    "kahan_adamw": ADAMW,
    "sr_adamw": ADAMW,
    "extra_bits_adamw": ADAMW,
    "lowbit_adamw": ADAMW,
    "factored_adamw": ADAMW,
    "lowbit_lion": {"learning_rate": 1e-2, "weight_decay": 1e-4},
}
"""Every alias that works on plain arrays, with the arguments of optax's tests."""

UNWRAPPED = {"wrapper_name": None, "wrapper_kwargs": None}


def alias(name):
    """An alias that also packs small leaves, such as the leaves of optax's tests."""
    made = getattr(lowbit_optax, name)

    @functools.wraps(made)
    def make(*args, **options):
        return made(*args, **{**options, "min_size": 0})

    return make


@functools.cache
def module(name):
    """A test module, such as ``_src.alias_test``, that cannot set flags of XLA."""
    flags = os.environ.get("XLA_FLAGS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module(f"optax.{name}")
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags
    return found


def run(module_name, class_name, test, **arguments):
    """Run the body of a parametrised optax test with other arguments."""
    of_class = getattr(module(module_name), class_name)
    case = types.new_class("Case", (of_class,))("id")
    _body(of_class, test)(case, **arguments)


def _body(of_class, test):
    for name in dir(of_class):
        body = getattr(getattr(of_class, name), "__wrapped__", None)
        if name.startswith(test) and body is not None and body.__name__ == test:
            return body
    return pytest.skip(f"this optax has no {of_class.__name__}.{test}")


def run_with(aliases, module_name, class_name, test):
    """Run an optax test with this package's aliases where its module names optax's.

    Args:
      aliases: aliases by the names of optax's, such as ``{"sgd": kahan_sgd}``.
      module_name, class_name: module and class of the test.
      test: name of the test; all cases of a parametrised test run.
    """
    tests = module(module_name)
    of_class = getattr(tests, class_name)
    names = [
        name for name in dir(of_class) if name == test or _is_case_of(test, name)
    ] or pytest.skip(f"this optax has no {class_name}.{test}")
    theirs = tests.alias
    tests.alias = types.SimpleNamespace(**{**vars(theirs), **aliases})
    try:
        result = unittest.TestResult()
        for name in names:
            of_class(name).run(result)
    finally:
        tests.alias = theirs
    for _, trace in result.failures + result.errors:
        pytest.fail(trace, pytrace=False)


def _is_case_of(test, name):
    return name.startswith(test) and (name[len(test) :].isdigit())


def keeping_params(make):
    """An alias whose ``update`` may be called without params, like optax's SGD.

    Without params, it uses those from ``init``. SGD's updates do not depend on params.
    """

    @functools.wraps(make)
    def keeping(*args, **options):
        inner = make(*args, **options)

        def update(updates, state, params=None, **extra_args):
            first, state = state
            params = first if params is None else params
            updates, state = inner.update(updates, state, params, **extra_args)
            return updates, (first, state)

        return optax.GradientTransformationExtraArgs(
            lambda params: (params, inner.init(params)), update
        )

    return keeping


def patch(monkeypatch):
    """Put this package's optimizers into the two tables of optax's tests."""
    common, of_alias = module("contrib._common_test"), module("_src.alias_test")
    monkeypatch.setattr(common, "_get_opt_factory", alias)
    monkeypatch.setattr(of_alias, "_get_opt", lambda _, name: alias(name))
    # The tests compare versions as strings, so 0.10 would be older than 0.7.2.
    monkeypatch.setattr(jax, "__version__", "0.9.9")
