"""The page on reliability names tests that exist, for every defect of the list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()


def rows():
    """The table of defects: {number: the last cell}."""
    found = re.findall(r"^\| V(\d+) \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE)
    return {int(number): cell for number, cell in found}


def known_tests():
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_defect_is_answered_by_tests_that_exist():
    table, known = rows(), known_tests()
    assert sorted(table) == list(range(1, 16))
    for number, cell in table.items():
        named = re.findall(r"`(test_\w+)`", cell)
        assert named, f"V{number} names no test"
        assert not set(named) - known, f"V{number}: {set(named) - known}"


def test_every_place_that_is_named_exists():
    for place in re.findall(r"`(tests/[\w/.]+)`", PAGE):
        assert (ROOT / place).exists(), place
