"""Eight CPU devices, quick compilation, markers for folders, strict dtype promotion."""

import gc
import os
import shutil
import zlib
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

COMPILED = {Path(__file__).parent / name for name in ("gpu_program", "tpu_program")}
LONG = {"exhaustive", "compiled", "example", "trainers"}
MANY_CASES = 16
KEEP_ALL_PROGRAMS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# From 0.11, JAX warns whenever a kernel is lowered for Triton, which many tests select
# for its bounds. A test that expects no such warning must turn it into an error again.
TRITON_IS_DEPRECATED = (
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


def _set_xla_flag(name, value):
    """Set a flag of XLA, unless the environment sets it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=lambda text: tuple(map(int, text.split("/"))),
        default=(1, 1),
        metavar="K/N",
        help="the K-th of N parts of about the same size",
    )


def pytest_collection_finish():
    """Exclude all objects that exist now from later garbage collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


class DropsPrograms:
    """Drop a file's compiled programs, so that two workers fit in a laptop's memory.

    It is a plugin, because the hooks of this file do not run for doctests elsewhere.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item, nextitem):
        if nextitem is None or nextitem.path != item.path:
            jax.clear_caches()
            gc.collect()


def pytest_configure(config):
    """Set XLA's flags, which XLA reads later, when the first array is made."""
    config.pluginmanager.register(DropsPrograms())
    options = config.option
    given = config.args_source is config.ArgsSource.ARGS
    if not (given or options.keyword or options.markexpr):
        options.markexpr = "few"  # xdist's workers inherit the options
    _set_xla_flag("xla_force_host_platform_device_count", 8)
    # Most of the time is compilation. Level 1 needs a third of it, and contracts
    # products and sums like level 3, so that results have the same bits. Programs for
    # GPUs are measured, and need the level that users have.
    if options.markexpr in ("few", "rest") or not _may_be_measured(config.args):
        _set_xla_flag("xla_backend_optimization_level", 1)
        _keep_programs(config)
    # XLA's older way to fuse loops on CPUs, which JAX 0.11 drops, needs three quarters
    # of the remaining time. It contracts differently, so two of the other cases fail.
    if options.markexpr == "few" and jax.__version_info__ < (0, 11):
        _set_xla_flag("xla_cpu_use_fusion_emitters", "false")


def _may_be_measured(args) -> bool:
    """Whether these paths contain tests of compiled programs."""
    paths = [Path(arg.split("::")[0]).resolve() for arg in args]
    return any(
        path.is_relative_to(folder) or folder.is_relative_to(path)
        for path in paths
        for folder in COMPILED
    )


def _keep_programs(config):
    """Keep compiled programs in pytest's cache, for the other worker and the next run.

    Measurements cannot use it, because XLA dumps nothing for programs from a cache.
    """
    if not hasattr(config, "cache") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = config.cache.mkdir("compiled")
    if sum(x.stat().st_size for x in folder.iterdir()) > 2**30:
        shutil.rmtree(folder)
    for name, value in KEEP_ALL_PROGRAMS.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the processes that tests start
    jax.config.update("jax_compilation_cache_dir", str(folder))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config, items):
    for item in items:
        if COMPILED & set(item.path.parents):
            item.add_marker("compiled")
            item.add_marker("standard_promotion")
            item.add_marker(pytest.mark.filterwarnings(TRITON_IS_DEPRECATED))
    quick = [x for x in items if not LONG & {*x.keywords}]
    few = _few_cases(quick)
    for item in quick:
        item.add_marker("few" if item.nodeid in few else "rest")
    part, count = config.option.part
    parts = [], []
    for item in items:
        parts[zlib.crc32(item.nodeid.encode()) % count == part - 1].append(item)
    others, items[:] = parts
    config.hook.pytest_deselected(items=others)


def _few_cases(items) -> set[str]:
    """The cases in README's quick run: two of a test with many cases, otherwise one.

    The first case depends on the test's name, so that all optimizers, formats and
    shapes are covered. Tests marked as slow to compile have no case here, because other
    tests check the same behaviour with smaller programs. CI runs all cases.
    Tests marked with every_case have all cases here, because each takes milliseconds.
    """
    cases, kept = {}, set()
    for item in items:
        if item.get_closest_marker("slow_to_compile"):
            continue
        if item.get_closest_marker("every_case"):
            kept.add(item.nodeid)
            continue
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, of_one_test in cases.items():
        size = len(of_one_test)
        count = 2 if size >= MANY_CASES else 1
        first = zlib.crc32(name.encode())
        kept |= {
            of_one_test[(first + i * size // count) % size].nodeid for i in range(count)
        }
    return kept


@pytest.fixture(autouse=True)
def dtype_promotion(request):
    """Use strict dtype promotion, so that no dtype is promoted by accident.

    It is a fixture of tests only, so doctests run with the promotion that users have.
    """
    standard = request.node.get_closest_marker("standard_promotion")
    with jax.numpy_dtype_promotion("standard" if standard else "strict"):
        yield
