"""The documentation names everything public, and its links lead somewhere."""

import importlib
import re

import pytest
from places import ROOT

from benchmarks.registry import BENCHMARKS

DOCS = ROOT / "docs"
API = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
DOCUMENTED = set(re.findall(r"^::: (\S+)$", API, re.MULTILINE))
NEWCOMERS = (
    "README.md",
    "docs/index.md",
    "docs/getting_started.md",
    "docs/choosing.md",
    "docs/coming_from.md",
    "docs/recipes.md",
    "docs/sharding.md",
    "docs/checkpoints.md",
    "docs/diagnosing.md",
)
MODULES = (
    "lowbit_optax",
    "lowbit_optax.block_scaling",
    "lowbit_optax.formats",
    "lowbit_optax.loss_scaling",
    "lowbit_optax.lpmm",
    "lowbit_optax.precision",
    "lowbit_optax.release",
    "lowbit_optax.reports",
    "lowbit_optax.transformations",
    "pallas_kernels",
)


def _object(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute, None)


def test_the_reference_has_every_public_name():
    documented = {id(_object(name)) for name in DOCUMENTED}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            full = f"{module}.{name}"
            assert id(_object(full)) in documented, full


def test_the_reference_has_no_other_names():
    for name in DOCUMENTED:
        assert _object(name) is not None, name


def _pages():
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return [*top, ROOT / "benchmarks" / "README.md", *DOCS.rglob("*.md")]


def test_links_lead_to_files_that_are_there():
    for page in _pages():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_front_page_begins_with_readme_s_install_and_swap_and_the_warning():
    # A phone shows more than the first 24 lines while no picture is among them.
    first_screen = "\n".join((DOCS / "index.md").read_text().splitlines()[:24])
    assert "![" not in first_screen
    readme = (ROOT / "README.md").read_text()
    (swap,) = re.findall(r"^\+(.*)", first_screen, re.MULTILINE)
    swap = f">>> {swap.replace('lowbit(', 'lowbit_optax.lowbit(')}\n"
    assert swap in readme
    for text in ("\npip install -e .", "No TPU has run it"):
        assert text in readme
        assert text in first_screen


def _tables(page):
    shown = re.sub(r"`|\*\*|\]\([^)]*\)", "", page.read_text())
    for block in re.findall(r"(?:^\|.*\n)+", shown, re.MULTILINE):
        yield [line.strip("|").split("|") for line in block.splitlines()]


@pytest.mark.parametrize("page", NEWCOMERS)
def test_no_table_that_newcomers_read_is_wider_than_a_phone(page):
    """A column takes its longest word, broken after hyphens, and 4 of padding.

    There are 45 characters on 390 pixels of GitHub; the site's are smaller.
    """
    for head, _, *body in _tables(ROOT / page):
        columns = map(" ".join, zip(head, *body, strict=True))
        words = [re.findall(r"[^\s-]+-?|-", column) for column in columns]
        assert sum(max(map(len, column)) + 4 for column in words) <= 45, head


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation


def test_every_command_names_a_file_that_is_there():
    for page in _pages():
        text = page.read_text()
        for name in re.findall(r"\b((?:benchmarks|examples|tests)/[\w/]+\.py)\b", text):
            assert (ROOT / name).exists(), f"{page}: {name}"
        for name in re.findall(r"-m benchmarks (\w+)", text):
            assert name in {*BENCHMARKS, "all"}, f"{page}: {name}"
