"""The import rules of docs/design.md."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "pallas_flash").rglob("*.py"))
LAYERS = sorted((ROOT / "flax_layers").rglob("*.py"))
# Modules of pallas_flash, lowest first: each may import only what stands before it.
ORDER = [
    "promotion",
    "checks",
    "dropout",
    "spans",
    "softmax",
    "masks",
    "position_masks",
    "token_masks",
    "pair_masks",
    "visits",
    "scores",
    "picture",
    "problem",
    "sharding",
    "devices",
    "tile_table",
    "kernels",
    "dispatch",
    "attention",
    "tuning",
    "varlen",
]


def imports(path):
    """(module, names) of each import, relative ones as pallas_flash.*."""
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            yield ".".join([*base, *([node.module] if node.module else [])]), [a.name for a in node.names]


@pytest.mark.parametrize("path", PACKAGE + LAYERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_private_jax_and_no_heavy_dependency(path):
    for module, _ in imports(path):
        assert not module.startswith("jax._src"), f"{path}: {module}"
        top = module.split(".")[0]
        if path in PACKAGE:
            assert top not in ("flax", "flax_layers", "tests", "benchmarks", "examples"), f"{path}: {module}"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    own = path.relative_to(ROOT / "pallas_flash").parts
    if own == ("__init__.py",):
        return
    level = ORDER.index(own[0].removesuffix(".py"))
    for module, names in imports(path):
        if not module.startswith("pallas_flash"):
            continue
        rest = module.split(".")[1:]
        for target in rest[:1] or names:
            if target in ORDER and not (
                own[0] in ("masks.py", "pair_masks.py") and target in ("kernels", "picture")
            ):  # Mask.dense and BlockMap.of, inside a function
                assert ORDER.index(target) <= level, f"{path} imports {module}"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_triton_is_named_in_one_folder(path):
    """The backend is deprecated upstream: the day it goes, one folder goes."""
    if "triton" not in path.parts:
        assert not any("pallas" in m and "pallas_flash" not in m for m, _ in imports(path)), path


@pytest.mark.parametrize("path", LAYERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_use_public_names(path):
    for module, _ in imports(path):
        assert not module.startswith("pallas_flash."), f"{path}: {module}"
