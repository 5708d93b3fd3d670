"""Ranks that share a key, and one that does not."""

from __future__ import annotations

import pytest
import zmq

from neuron_push.config import Config
from tests.hostile.scene import Scene, nothing_left, transfer

pytestmark = pytest.mark.real_nixl


@pytest.fixture
def key_file(tmp_path):
    def make(name):
        path = tmp_path / name
        path.write_text(zmq.curve_keypair()[1].decode())
        path.chmod(0o400)
        return str(path)

    return make


def test_ranks_with_a_key_transfer_and_one_with_another_is_told_why(stage, key_file):
    scene: Scene = stage(side_channel_keys=key_file("shared"))
    p, d = scene.rank("P", "producer"), scene.rank("D", "consumer")
    transfer(scene, p, d, "warm")
    scene.config = Config(side_channel_keys=key_file("other"))
    stranger = scene.rank("S", "consumer")
    p.offer("hit", [1, 2], 1)
    attempt = stranger.want("hit", [1, 2], p.address)
    scene.hears(stranger, "ReceiveFailed", attempt, within=10)
    assert "has other side_channel_keys or none" in stranger.reason(attempt)
    assert stranger.differing([1, 2], 0) == 0
    transfer(scene, p, d, "again")
    nothing_left(scene, d)
