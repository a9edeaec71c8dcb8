"""The README's code runs, and so do the examples in docstrings."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import flax_layers
import pallas_flash

ROOT = pathlib.Path(__file__).parent.parent


def test_readme_code():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # the blocks continue each other
    assert names["out"].shape == (2, 64, 8, 64) and names["lse"].shape == (2, 8, 64)
    assert len(names["changed"]) == 1


MODULES = [m.name for p in (pallas_flash, flax_layers) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    # A function may have its module's name (kernels/triton/forward.py), so the module is asked for by name.
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def test_public_functions_have_examples():
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("flash_attention", "explain", "dense_mask", "interpret", "merge", "use_implementation", "mask"):
        function = getattr(pallas_flash, name)
        assert any(t.examples for t in finder.find(function, name)), name
