"""Ports that are chosen now and bound later."""

from __future__ import annotations

import random
import socket

import pytest

from neuron_push import ports
from neuron_push.errors import NeuronPushError
from neuron_push.ports import HOST, ephemeral, free_ports

LOWEST, HIGHEST = 10_000, 65_535


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(ports, "_given", set())


def lend(monkeypatch, *spans):
    """Leave nothing of our own range to us but what lies between these spans."""
    lent = {port for first, last in spans for port in range(first, last + 1)}
    monkeypatch.setattr(ports, "ephemeral", lambda: lent)


def test_what_the_kernel_says_is_understood():
    assert ephemeral("32768\t60999\n") == range(32768, 61000)
    assert ephemeral() == ephemeral(ports._EPHEMERAL.read_text())


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3"])
def test_what_is_not_understood_is_the_usual_range(text):
    assert ephemeral(text) == range(49152, 65536)


def test_a_kernel_that_says_nothing_is_like_others(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "none")
    assert ephemeral() == range(49152, 65536)


def test_no_outgoing_connection_is_given_one_of_them():
    chosen = free_ports(50)
    assert len(set(chosen)) == 50
    assert not set(chosen) & set(ephemeral())
    assert all(LOWEST <= port <= HIGHEST for port in chosen)


def test_a_port_is_not_chosen_twice(monkeypatch):
    lend(monkeypatch, (LOWEST, 12_344), (12_365, HIGHEST))
    chosen = [port for _ in range(15) for port in free_ports(1)]
    assert len(set(chosen)) == 15 and set(chosen) <= set(range(12_345, 12_365))


def test_once_all_were_chosen_they_are_chosen_again(monkeypatch):
    lend(monkeypatch, (LOWEST, 12_344), (12_347, HIGHEST))
    first, second = sorted(free_ports(2)), sorted(free_ports(2))
    assert first == second == [12_345, 12_346]


@pytest.mark.parametrize("where", [HOST, ""])
def test_what_somebody_has_is_passed_over(monkeypatch, where):
    (taken, other) = free_ports(2)
    lent = set(range(LOWEST, HIGHEST + 1)) - {taken, other}
    monkeypatch.setattr(ports, "ephemeral", lambda: lent)
    with socket.create_server((where, taken)):
        assert free_ports(1) == [other]
        with pytest.raises(NeuronPushError, match="no 2 free TCP ports"):
            free_ports(2)


def test_where_all_ports_are_lent_one_of_them_is_chosen(monkeypatch):
    lend(monkeypatch, (1, HIGHEST))
    (port,) = free_ports(1)
    assert LOWEST <= port <= HIGHEST


def test_processes_that_begin_alike_choose_differently():
    begun_alike = set()
    for _ in range(5):
        random.seed(1)
        ports._given.clear()
        begun_alike.update(free_ports(1))
    assert len(begun_alike) > 1
