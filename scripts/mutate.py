"""Falsify every stride and offset where planes are made, one at a time: a test must notice each.

    python scripts/mutate.py            a line per mutant, and exit status 1 if one survives
    python scripts/mutate.py --list     only say what would be falsified
    python scripts/mutate.py TEXT       only mutants whose line contains this

A mutant is one keyword argument of a `Plane` (or an axis of `geometry.axes`) whose value is wrong
by one element or by a factor of two. Each runs the tests below in a process of its own, which stops
at the first failure. Takes some minutes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "neuron_push.layouts.vllm",
    "neuron_push.layouts.neuron",
    "neuron_push.layouts.state",
    "neuron_push.layouts.view",
    "neuron_push.geometry",
)
FIELDS = ("offset", "page", "head", "token", "channel", "width", "page_bytes")
CHANGES = {"+ 4": 4, "* 2": None}
TESTS = ("tests/test_layouts.py", "tests/test_plan.py", "tests/test_geometry.py")


@dataclass(frozen=True)
class Mutant:
    """The value at `place` (a keyword or an argument), in this module, changed."""

    module: str
    line: int
    field: str
    change: str
    index: int  # of the value among those of its module

    def __str__(self) -> str:
        path = self.module.replace(".", "/")
        return f"{path}.py:{self.line}: {self.field} {self.change}"


def values(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Every stride, offset and size that a module gives to a plane or an axis."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "Plane":
            # What an opaque page holds is in its tag; nothing is computed from its width.
            opaque = any(keyword.arg == "interior" for keyword in node.keywords)
            for keyword in node.keywords:
                counts = keyword.arg in FIELDS and not (opaque and keyword.arg == "width")
                if keyword.arg and counts and not _is_zero(keyword.value):
                    yield keyword.arg, keyword.value
        elif node.func.id == "beside":
            yield from zip(("offset", "width"), node.args[1:], strict=True)
        elif node.func.id == "Axis" and len(node.args) == 3:
            yield "stride", node.args[2]


def _is_zero(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 0


def mutants() -> Iterator[Mutant]:
    for module in MODULES:
        for index, (field, value) in enumerate(values(ast.parse(_source(module)))):
            for change in CHANGES:
                yield Mutant(module, value.lineno, field, change, index)


def _source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text()


def apply(mutant: Mutant) -> None:
    """Give the module's functions the falsified code, wherever they were imported to."""
    tree = ast.parse(_source(mutant.module))
    value = list(values(tree))[mutant.index][1]
    before, amount = copy.copy(value), CHANGES[mutant.change]
    operator: ast.operator = ast.Mult() if amount is None else ast.Add()
    wrong = ast.BinOp(before, operator, ast.Constant(amount or 2))
    _replace(tree, value, wrong)
    code = compile(ast.fix_missing_locations(tree), mutant.module, "exec")
    falsified = types.ModuleType(mutant.module)
    sys.modules[f"{mutant.module}.falsified"] = falsified
    falsified.__name__ = f"{mutant.module}.falsified"
    exec(code, falsified.__dict__)  # noqa: S102  our own source
    for name, true in vars(importlib.import_module(mutant.module)).items():
        if isinstance(true, types.FunctionType) and true.__module__ == mutant.module:
            true.__code__ = getattr(falsified, name).__code__


def _replace(tree: ast.AST, old: ast.expr, new: ast.expr) -> None:
    for node in ast.walk(tree):
        for field, held in ast.iter_fields(node):
            if held is old:
                setattr(node, field, new)
            elif isinstance(held, list) and any(item is old for item in held):
                held[next(i for i, item in enumerate(held) if item is old)] = new


def survives(mutant: Mutant | None) -> bool:
    """Whether the tests pass with a mutant (or with none), in a process of their own."""
    child = os.fork()
    if not child:
        import pytest

        if mutant is not None:
            apply(mutant)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        words = ["-x", "-q", "-p", "no:cacheprovider", *TESTS]
        os._exit(1 if pytest.main(words) == 0 else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="only say what would be falsified")
    parser.add_argument("only", nargs="?", default="", help="text in the mutants' lines")
    options = parser.parse_args()
    every = [mutant for mutant in mutants() if options.only in str(mutant)]
    if options.list:
        print(*every, sep="\n")
        return 0
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for module in ("pytest", "torch", "hypothesis", "tests.fleet", *MODULES):
        importlib.import_module(module)
    if not survives(None):
        print("the tests fail without any mutant; nothing is proved")
        return 1
    left, began = [], time.monotonic()
    for number, mutant in enumerate(every, 1):
        alive = survives(mutant)
        left += [mutant] * alive
        print(f"{number}/{len(every)} {'SURVIVES' if alive else 'noticed '} {mutant}", flush=True)
    took = time.monotonic() - began
    print(f"{len(every) - len(left)} of {len(every)} mutants noticed in {took:.0f} s")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
