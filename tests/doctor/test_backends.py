from __future__ import annotations

import pytest

from neuron_push.doctor import backends
from neuron_push.doctor.machine import Ran
from tests.devices import machine as files
from tests.doctor.kit import FakeMachine, answer, found, levels

LOG = (
    "I1129 23:45:03.882641 9572 nixl_plugin_manager.cpp:352] Failed to load plugin from "
    "/x/libplugin_LIBFABRIC.so: {}\n"
    "E1129 23:45:03.882708 9572 nixl_agent.cpp:334] createBackend: unsupported backend\n"
)


def machine(tmp_path, kind="bare", ucx=None, libfabric=None):
    {"trn2": files.trn2, "p5en": files.p5en, "bare": lambda root: root}[kind](tmp_path)
    children = {"backend UCX": ucx or answer(), "backend LIBFABRIC": libfabric or answer()}
    return FakeMachine(tmp_path, {}, versions={"nixl-cu12": "1.5.1"}, children=children)


def test_without_nixl_there_is_nothing_to_try(tmp_path):
    assert levels(backends.check(FakeMachine(tmp_path, {}))) == {}


def test_what_works_is_fine(tmp_path):
    seen = found(backends.check(machine(tmp_path)))
    assert seen["nixl.UCX"].seen == "instantiated, for DRAM/VRAM"
    assert seen["nixl.UCX.loopback"].seen == "64 MiB at 0.62 GiB/s, checksum equal"
    assert {each.level for each in seen.values()} == {"ok", "note"}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "/usr/lib/libfabric.so.1: version `FABRIC_1.10' not found (required by /x.so)",
            "libfabric 2.7 or newer",
        ),
        ("libfabric.so.1: cannot open shared object file", "install libfabric"),
        ("libcuda.so.1: cannot open shared object file", "stub library"),
        ("libcudart.so.12: cannot open shared object file", "nvidia-cuda-runtime"),
        ("libhwloc.so.15: cannot open shared object file", "install hwloc"),
        ("libodd.so: cannot open shared object file", "NIXL_LOG_LEVEL=DEBUG"),
    ],
)
def test_the_loaders_words_lead_to_the_remedy(tmp_path, words, remedy):
    ran = Ran(1, "cannot create a NIXL agent\n", LOG.format(words))
    finding = found(backends.check(machine(tmp_path, "p5en", libfabric=ran)))["nixl.LIBFABRIC"]
    assert finding.level == "error"
    assert words in finding.seen
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("kind", "backend", "level"),
    [
        ("bare", "UCX", "error"),
        ("bare", "LIBFABRIC", "note"),
        ("p5en", "UCX", "note"),
        ("p5en", "LIBFABRIC", "error"),
        ("trn2", "LIBFABRIC", "error"),
    ],
)
def test_only_what_engines_need_here_is_an_error(tmp_path, kind, backend, level):
    here = machine(tmp_path, kind)
    here.children[f"backend {backend}"] = Ran(1, "it does not work\n", "")
    finding = found(backends.one(here, backend))[f"nixl.{backend}"]
    assert (finding.level, "it does not work" in finding.seen) == (level, True)


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (Ran(None, "", "half a line"), "did not end within"),
        (Ran(-11, "", "noise"), "died of signal 11"),
        (Ran(3, "", ""), "status 3"),
    ],
)
def test_a_process_that_hangs_or_dies_is_told_apart(tmp_path, ran, words):
    assert words in found(backends.check(machine(tmp_path, ucx=ran)))["nixl.UCX"].seen


@pytest.mark.parametrize("kind", ["trn2", "p5en"])
def test_libfabric_without_device_memory_is_an_error(tmp_path, kind):
    ran = answer(memory=["DRAM"], providers=["tcp"])
    finding = found(backends.check(machine(tmp_path, kind, libfabric=ran)))["nixl.device_memory"]
    assert finding.level == "error"
    assert "DRAM over tcp" in finding.seen


def test_rails_are_shown(tmp_path):
    ran = answer(rails="16 rails: rdmap85s0")
    assert found(backends.check(machine(tmp_path, "p5en", libfabric=ran)))["nixl.rails"].seen


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failure": "it did not arrive within 60 s"}, "did not arrive"),
        ({"equal": False}, "checksum differs"),
    ],
)
def test_a_write_that_goes_wrong_is_an_error(tmp_path, changes, words):
    here = machine(tmp_path, ucx=answer(**changes))
    finding = found(backends.check(here))["nixl.UCX.loopback"]
    assert finding.level == "error"
    assert words in finding.seen
