"""The architecture: which module may import which, read from the sources with ast.

Imports point one way: command line, benchmarks, emulation, router and vLLM facade -> transfer
-> rendezvous, plan, transport -> protocol, geometry and other leaves. Imports under
TYPE_CHECKING count too: a type that points upward is the same knot.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "neuron_push"

# A unit is a module or package right below neuron_push. It may import units of lower layers,
# itself, and what SIDEWAYS names; the first and the last layer may also import among themselves.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "versions",
            "config",
            "limits",
            "geometry",
            "layouts",
            "backends",
            "tensors",
            "efa",
            "protocol",
            "commands",
            "prompts",
            "hostmover",
            "machinecode",
            "transform",
            "accelerator",
            "ports",
            "processes",
            "tracing",
            "waiting",
        }
    ),
    frozenset(
        {"plan", "rendezvous", "transport", "nixl", "tamper", "sidechannel", "memory", "bounce"}
    ),
    frozenset({"transfer", "engines"}),
    frozenset(
        {
            "vllm",
            "emulation",
            "router",
            "bench",
            "demo",
            "explain",
            "shapes",
            "doctor",
            "cli",
            "tiny_model",
            "trace",
            "top",
            "rayserve",
        }
    ),
)
# An implementation beside its interface and its test fault; the words that actions and events
# are written in.
SIDEWAYS = {
    ("nixl", "transport"),
    ("nixl", "tamper"),
    ("tamper", "transport"),
    ("memory", "transport"),
    ("bounce", "transport"),
    ("rendezvous", "plan"),
    ("rendezvous", "transport"),
}
CORE = frozenset().union(*LAYERS[:3])
LAYER_OF = {unit: level for level, units in enumerate(LAYERS) for unit in units}

NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}
ENGINE = NIXL | {"vllm", "torch"}
VENDORS = {"neuron_push_cuda", "neuron_push_neuron"}
# Rendezvous is a pure function of events and times.
IMPURE = ENGINE | {"threading", "socket", "time", "zmq", "asyncio", "queue", "random"}
# The side channel's messages and the settings, nothing that leads to a device.
ROUTER_MAY = {
    "router", "protocol", "sidechannel", "tracing", "config", "errors", "limits", "versions",
}  # fmt: skip


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[str, bool]]:
    """Absolute names that a file imports, and whether that happens when it is loaded.

    `from a import b` yields a.b: b may be a module, and the prefix a is then covered too.
    """
    package = path.relative_to(root).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text(), str(path))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    deferred = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        at_load = id(node) not in deferred
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield from ((f"{base}.{alias.name}", at_load) for alias in node.names)


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0]


def top(name: str) -> str:
    return name.partition(".")[0]


def files_of(*units: str) -> list[Path]:
    return [path for path in sources(ROOT / PACKAGE) if unit_of(path) in units]


def offences(paths: list[Path], forbidden: set[str], *, deferred_too: bool = True) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name, at_load in imports(path)
        if top(name) in forbidden and (at_load or deferred_too)
    ]


def own_imports(path: Path) -> set[str]:
    """Units of this package that a file imports."""
    names = {name.split(".")[1] for name, _ in imports(path) if name.startswith(f"{PACKAGE}.")}
    return {name for name in names if not name.startswith("__")}


def test_every_module_has_a_layer():
    units = {unit_of(path) for path in sources(ROOT / PACKAGE)} - {"__init__", "__main__"}
    missing = units - set(LAYER_OF)
    assert not missing, f"give these a layer in {Path(__file__).name}: {sorted(missing)}"


def test_imports_point_one_way():
    wrong = []
    for path in files_of(*LAYER_OF):
        unit = unit_of(path)
        for other in own_imports(path) - {unit}:
            here, there = LAYER_OF[unit], LAYER_OF.get(other)
            beside = here == there and here in (0, len(LAYERS) - 1)
            if there is None or not (there < here or beside or (unit, other) in SIDEWAYS):
                wrong.append(f"{path.relative_to(ROOT)} imports {PACKAGE}.{other}")
    assert not wrong


def test_no_module_names_a_vendor():
    assert not offences(sources(ROOT / PACKAGE), VENDORS)


def test_only_the_facade_and_the_emulation_import_vllm():
    """A benchmark may import vLLM's own connectors inside the function that compares."""
    rest = [path for path in sources(ROOT / PACKAGE) if unit_of(path) not in ("vllm", "emulation")]
    benchmarks = [path for path in rest if unit_of(path) == "bench"]
    others = [path for path in rest if unit_of(path) != "bench"]
    assert not offences(others, {"vllm"})
    assert not offences(benchmarks, {"vllm"}, deferred_too=False)


def test_the_core_loads_without_an_engine():
    assert not offences(files_of(*CORE - {"nixl"}), ENGINE)
    # The one place that talks to NIXL loads it when an agent is made.
    assert not offences(files_of("nixl"), ENGINE, deferred_too=False)


def test_rendezvous_is_pure_and_so_is_all_it_stands_on():
    units, found = set(), {"rendezvous"}
    while found - units:
        units |= found
        found = {name for path in files_of(*units) for name in own_imports(path)}
    assert not offences(files_of(*units), IMPURE)


def test_the_router_knows_the_protocol_only():
    files = files_of("router")
    assert not offences(files, ENGINE)
    assert not {name for path in files for name in own_imports(path)} - ROUTER_MAY


@pytest.mark.parametrize("kind", ["cuda", "neuron"])
def test_an_accelerator_sees_only_its_contract(kind):
    root = ROOT / "accel" / kind
    contract = "accelerator backends efa errors geometry layouts tensors transform"
    allowed = {f"{PACKAGE}.{module}" for module in contract.split()}
    wrong = [
        f"{path.relative_to(root)} imports {name}"
        for path in sources(root / f"{PACKAGE}_{kind}")
        for name, at_load in imports(path, root)
        if (top(name) == PACKAGE and ".".join(name.split(".")[:2]) not in allowed)
        or (top(name) in ENGINE and at_load)
    ]
    assert not wrong


def test_loading_the_core_pulls_in_no_engine():
    """The same from the outside: what is in sys.modules after importing it all."""
    light = CORE | {"vllm", "router", "cli"}
    present = sorted({unit_of(path) for path in sources(ROOT / PACKAGE)} & light)
    code = "import importlib, sys\n"
    code += "".join(f"importlib.import_module('{PACKAGE}.{unit}')\n" for unit in present)
    code += f"print(*sorted({ENGINE | VENDORS!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", f"loaded by {present}"


def test_the_walk_sees_relative_and_deferred_imports(tmp_path):
    file = tmp_path / "neuron_push/vllm/sample.py"
    file.parent.mkdir(parents=True)
    file.write_text("from ..plan import x\nfrom . import y\ndef f():\n    import torch.cuda\n")
    assert list(imports(file, tmp_path)) == [
        ("neuron_push.plan.x", True),
        ("neuron_push.vllm.y", True),
        ("torch.cuda", False),
    ]
