from __future__ import annotations

import pytest

from neuron_push.doctor import variables
from tests.devices import machine as files
from tests.doctor.kit import FakeMachine, found, levels

CALM = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}


def machine(tmp_path, kind, environ):
    {"trn2": files.trn2, "p5en": files.p5en, "bare": lambda root: root}[kind](tmp_path)
    return FakeMachine(tmp_path, environ)


@pytest.mark.parametrize("kind", ["bare", "trn2", "p5en"])
def test_a_calm_environment_is_fine(tmp_path, kind):
    assert levels(variables.check(machine(tmp_path, kind, CALM))) == {"variables": "ok"}


@pytest.mark.parametrize(
    ("kind", "variable", "value", "level"),
    [
        ("p5en", "FI_PROVIDER", "tcp", "error"),
        ("trn2", "FI_PROVIDER", "tcp;ofi_rxm", "error"),
        ("trn2", "FI_HMEM_DISABLE_P2P", "1", "error"),
        ("p5en", "FI_EFA_USE_DEVICE_RDMA", "0", "error"),
        ("trn2", "FI_HMEM", "system,cuda", "error"),
        ("trn2", "FI_HMEM_NEURON_USE_DMABUF", "0", "warning"),
        ("trn2", "NEURON_RT_MAP_HBM", "0", "error"),
        ("trn2", "NEURON_SKIP_EFA_AFFINITY", "1", "warning"),
        ("trn2", "NEURON_RT_VISIBLE_CORES", "0-3", "warning"),
        ("p5en", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "error"),
        ("p5en", "PYTORCH_ALLOC_CONF", "a:1,expandable_segments : true", "error"),
        ("p5en", "UCX_TLS", "tcp,self,sm", "warning"),
        ("bare", "LD_LIBRARY_PATH", "/opt/hpcx/ucx/lib", "warning"),
        ("bare", "UCX_MODULE_DIR", "/opt/ucx", "warning"),
        ("bare", "NIXL_PLUGIN_DIR", "/nowhere", "error"),
        ("bare", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "2", "warning"),
        ("bare", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "soon", "warning"),
        ("p5en", "FI_EFA_ENABLE_SHM_TRANSFER", "1", "error"),
        ("trn2", "FI_EFA_ENABLE_SHM_TRANSFER", "1", "error"),
    ],
)
def test_each_trap_is_found_where_it_is_one(tmp_path, kind, variable, value, level):
    here = machine(tmp_path, kind, {**CALM, variable: value})
    assert levels(variables.check(here)) == {f"variables.{variable}": level}


@pytest.mark.parametrize(
    ("kind", "variable", "value"),
    [
        ("bare", "FI_PROVIDER", "tcp"),
        ("p5en", "FI_PROVIDER", "efa"),
        ("p5en", "NEURON_RT_MAP_HBM", "0"),
        ("trn2", "FI_HMEM", "system,neuron"),
        ("trn2", "NEURON_RT_MAP_HBM", "true"),
        ("bare", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("p5en", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False"),
        ("bare", "UCX_TLS", "tcp,self,sm"),
        ("p5en", "UCX_TLS", "^cma"),
        ("p5en", "UCX_TLS", "tcp,cuda_copy"),
        ("bare", "LD_LIBRARY_PATH", "/opt/amazon/efa/lib"),
        ("bare", "NIXL_PLUGIN_DIR", "/"),
        ("bare", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "120"),
    ],
)
def test_elsewhere_the_same_variable_is_fine(tmp_path, kind, variable, value):
    here = machine(tmp_path, kind, {**CALM, variable: value})
    assert levels(variables.check(here)) == {"variables": "ok"}


def test_every_trap_of_the_table_has_a_case_above():
    tried = test_each_trap_is_found_where_it_is_one.pytestmark[0].args[1]
    assert {trap.variable for trap in variables.TRAPS} <= {variable for _, variable, *_ in tried}


def test_shared_memory_must_be_switched_off(tmp_path):
    finding = found(variables.check(machine(tmp_path, "p5en", {})))
    assert "(unset)" in finding["variables.FI_EFA_ENABLE_SHM_TRANSFER"].seen


def test_the_keep_alive_is_the_routers():
    app = pytest.importorskip("neuron_push.router.app")
    assert variables.KEEP_ALIVE == app.KEEP_ALIVE


def test_secrets_are_not_shown(tmp_path):
    shown = variables.shown(
        FakeMachine(
            tmp_path,
            {"VLLM_API_KEY": "hush", "NIXL_AUTH": "hush", "FI_PROVIDER": "efa", "HOME": "/root"},
        )
    )
    assert shown == {
        "FI_PROVIDER": "efa",
        "NIXL_AUTH": "(redacted)",
        "VLLM_API_KEY": "(redacted)",
    }
