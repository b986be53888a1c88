"""Optax's own tests, from the installed optax, for the aliases of this package.

The wheel of optax holds its tests. The functions below call their bodies with our
aliases in place of optax's.
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
    "lowbit_lion": {"learning_rate": 1e-2, "weight_decay": 1e-4},
}
"""Every alias that takes plain arrays, with the arguments of optax's tests."""

UNWRAPPED = {"wrapper_name": None, "wrapper_kwargs": None}


def alias(name):
    """An alias that packs small leaves too, as those of optax's tests are."""
    made = getattr(lowbit_optax, name)

    @functools.wraps(made)
    def make(*args, **options):
        return made(*args, **{**options, "min_size": 0})

    return make


@functools.cache
def module(name):
    """A module of tests, such as ``_src.alias_test``, which sets no flags of XLA."""
    flags = os.environ.get("XLA_FLAGS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module(f"optax.{name}")
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags
    return found


def run(module_name, class_name, test, **arguments):
    """Run the body of a parametrised test of optax's with other arguments."""
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
    """Run a test of optax's, with our aliases where its module names optax's.

    Args:
      aliases: by the names of optax's, such as ``{"sgd": kahan_sgd}``.
      module_name, class_name: where the test is.
      test: its name; a parametrised one is run in all its cases.
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
    """An alias whose ``update`` may be called without params, as optax's SGD may.

    Then it takes those of ``init``: SGD's updates do not depend on them.
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
    """Put our optimizers into the two tables of optax's tests."""
    common, of_alias = module("contrib._common_test"), module("_src.alias_test")
    monkeypatch.setattr(common, "_get_opt_factory", alias)
    monkeypatch.setattr(of_alias, "_get_opt", lambda _, name: alias(name))
    # They compare versions as strings, and take 0.10 for older than 0.7.2.
    monkeypatch.setattr(jax, "__version__", "0.9.9")
