"""What the documentation shows must run."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

FENCE = re.compile(r"^```python( torch)?\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md", "docs/integrate.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        import torch  # noqa: F401
    except ImportError:
        torch = None
    blocks = [code for needs_torch, code in FENCE.findall((ROOT / page).read_text()) if torch or not needs_torch]
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_pages_link_to_what_exists():
    for page in [ROOT / "README.md", ROOT / "src" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
