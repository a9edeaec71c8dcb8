"""What docs/make.py writes is not stale, and covers every argument."""

import inspect
import re

import pytest

import pallas_flash as pf
from docs import make


@pytest.mark.parametrize("name, text", [("options.md", make.options_table), ("masks.md", make.masks_page)])
def test_written_pages_are_not_stale(name, text):
    assert (make.HERE / name).read_text() == text(), "run `python -m docs.make`"


def test_every_argument_is_in_the_table():
    named = set(re.findall(r"`(\w+)`", (make.HERE / "options.md").read_text()))
    arguments = inspect.signature(pf.flash_attention).parameters.keys()
    assert arguments - named == {"query", "key", "value", "implementation"}


def test_pictures_are_there_and_drawn(tmp_path):
    make.draw_masks(tmp_path)
    for name in make.MASKS:
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert (make.HERE / "masks" / f"{name}.png").exists()
