"""Keys of the side channel: who is let in, what the others hear, and how keys are rotated."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import zmq

from neuron_push import cli
from neuron_push.errors import ConfigError, Disconnected
from neuron_push.ports import free_ports
from neuron_push.protocol import Address, EngineInfo, Who
from neuron_push.sidechannel import Keyring, Listener, ask, ask_async
from neuron_push.sidechannel.keys import read
from tests.test_sidechannel import HOST, info, until


def make_key():
    return zmq.curve_keypair()[1].decode()


def write(path, *keys, mode=0o400):
    """Replace a key file, as a person or an orchestrator would."""
    fresh = path.with_suffix(".new")
    fresh.write_text("# side channel\n\n" + "\n".join(keys) + "\n")
    fresh.chmod(mode)
    fresh.rename(path)
    return path


@pytest.fixture
def ring(tmp_path):
    """Makes a ring over a file of these keys."""

    def make(name, *keys):
        return Keyring(write(tmp_path / name, *keys), period=0.0)

    return make


@pytest.fixture
def listen():
    listeners = []

    def make(keys=None):
        listeners.append(Listener("engine-1", HOST, *free_ports(1), info, keys=keys))
        return listeners[-1]

    yield make
    for each in listeners:
        each.close()


def said(caplog, words):
    until(lambda: any(words in record.getMessage() for record in caplog.records))


class Wire:
    """A relay that keeps what passes."""

    def __init__(self, target):
        self.seen = bytearray()
        self._target = target
        self._listening = socket.create_server((HOST, 0))
        self.address = Address(HOST, self._listening.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        inward, _ = self._listening.accept()
        outward = socket.create_connection((self._target.host, self._target.port))
        back = threading.Thread(target=self._pump, args=(outward, inward), daemon=True)
        back.start()
        self._pump(inward, outward)
        back.join()
        inward.close()
        outward.close()
        self._listening.close()

    def _pump(self, source, sink):
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


# --- who is let in ---------------------------------------------------------------------------


async def test_holders_of_a_key_ask_and_are_answered(ring, listen):
    key = make_key()
    listener = listen(ring("server", key))
    assert ask(listener.address, Who(), 5, ring("client", key)) == info()
    assert await ask_async(listener.address, Who(), 5, ring("client", key)) == info()


def test_what_is_said_with_keys_cannot_be_read_on_the_wire(ring, listen):
    key = make_key()
    for keys, readable in ((None, True), (ring("both", key), False)):
        wire = Wire(listen(keys).address)
        assert ask(wire.address, Who(), 5, keys) == info()
        assert (b"engine-1" in wire.seen) is readable
        assert len(wire.seen) > 100


def test_a_peer_without_a_key_is_turned_away_and_both_sides_say_why(ring, listen, caplog):
    listener = listen(ring("server", make_key()))
    with pytest.raises(Disconnected, match=f"{listener.address.port}.* has (some|side_ch)"):
        ask(listener.address, Who(), 5)
    said(caplog, "a peer was turned away")


def test_a_peer_with_a_key_is_turned_away_where_there_are_none(ring, listen, caplog):
    listener = listen()
    with pytest.raises(Disconnected, match=f"{listener.address.port} has (none|other)"):
        ask(listener.address, Who(), 5, ring("client", make_key()))
    said(caplog, "a peer was turned away")


@pytest.mark.parametrize("keys", [1, 2])
def test_a_peer_with_other_keys_is_turned_away_and_both_sides_say_why(ring, listen, caplog, keys):
    listener = listen(ring("server", make_key()))
    with pytest.raises(Disconnected, match="has other side_channel_keys or none"):
        ask(listener.address, Who(), 5, ring("client", *(make_key() for _ in range(keys))))
    said(caplog, "its key is not the one we answer with")


def test_knowing_the_public_half_of_a_key_is_not_enough(ring, listen, caplog):
    mine = ring("server", make_key())
    listener = listen(mine)
    stranger = zmq.curve_keypair()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, mine.keys[0].public)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, stranger[0])
    dealer.setsockopt(zmq.CURVE_SECRETKEY, stranger[1])
    dealer.connect(f"tcp://{HOST}:{listener.address.port}")
    said(caplog, "it holds none of our side_channel_keys")
    context.destroy(linger=0)


def test_a_server_goes_on_after_many_strangers(ring, listen, caplog):
    key = make_key()
    listener = listen(ring("server", key))
    for number in range(20):
        with pytest.raises(Disconnected):
            ask(listener.address, Who(), 5, ring(f"stranger-{number}", make_key()))
    assert ask(listener.address, Who(), 5, ring("client", key)) == info()
    assert sum("turned away" in record.getMessage() for record in caplog.records) <= 3


def test_a_keyed_listener_leaves_no_thread_behind(ring, listen):
    before = threading.active_count()
    listener = listen(ring("server", make_key()))
    listener.close()
    listener.close()
    until(lambda: threading.active_count() == before)


# --- rotation --------------------------------------------------------------------------------


def test_keys_are_rotated_under_running_engines(ring, listen, tmp_path):
    old, new = make_key(), make_key()
    servers, clients = [ring(f"s{n}", old) for n in range(2)], [ring(f"c{n}", old) for n in "ab"]
    listeners = [listen(each) for each in servers]

    def everybody_talks():
        for listener in listeners:
            for client in clients:
                assert ask(listener.address, Who(), 5, client) == info()

    everybody_talks()
    for step in ((old, new), (new, old), (new,)):
        for name in ("s0", "ca", "s1", "cb"):
            write(tmp_path / name, *step)
            everybody_talks()
    stranger = ring("stranger", old)
    for listener in listeners:
        # A listener looks at its file once a second when nobody asks.
        with pytest.raises(Disconnected):
            until(lambda where=listener.address: not ask(where, Who(), 5, stranger), 10)


def test_a_file_that_breaks_leaves_the_keys_in_use(ring, tmp_path, caplog):
    key = make_key()
    mine = ring("keys", key)
    before = mine.keys
    for broken in (("nonsense",), (), (make_key(),) * 3):
        write(tmp_path / "keys", *broken)
        assert mine.keys == before
    (tmp_path / "keys").unlink()
    assert mine.keys == before
    assert "stay in use" in caplog.text and key not in caplog.text
    write(tmp_path / "keys", other := make_key())
    assert mine.keys[0].secret.decode() == other


def test_a_file_is_looked_at_once_in_a_while(tmp_path):
    ring = Keyring(write(tmp_path / "keys", make_key()), period=3600.0)
    before = ring.keys
    write(tmp_path / "keys", make_key())
    assert ring.keys == before


# --- key files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [
        (0o400, None, ""),
        (0o600, None, ""),
        (0o644, None, "mode 0644: others may read or change it; chmod 0400"),
        (0o420, 0, "mode 0420"),
        (0o440, 0, ""),  # of root, readable for the engine's group: as orchestrators mount secrets
        (0o440, 65534, "belongs to another user"),
    ],
)
def test_files_that_others_may_read_are_refused(tmp_path, mode, owner, words):
    path = write(tmp_path / "keys", make_key(), mode=mode)
    if owner is not None:
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(path, owner, owner)
    if words:
        with pytest.raises(ConfigError, match=words):
            read(path)
    else:
        assert len(read(path)) == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds 0 keys; it must hold one, or two in rotation"),
        (["k"] * 3, "holds 3 keys"),
        (["short"], "a line is no key; `neuron-push key` makes one"),
        (["é" * 40], "a line is no key"),
    ],
)
def test_files_that_hold_no_keys_are_refused(tmp_path, lines, words):
    with pytest.raises(ConfigError, match=words):
        read(write(tmp_path / "keys", *lines))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Keyring(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"(is not a file|Is a directory)"):
        Keyring(tmp_path)
    assert Keyring.of("") is None


def test_the_command_makes_keys_and_nothing_shows_them(tmp_path, capsys):
    assert cli.main(["key"]) == 0
    key = capsys.readouterr().out.strip()
    (found,) = read(write(tmp_path / "keys", key))
    assert found.secret.decode() == key
    assert key not in repr(found)
    assert cli.main(["key"]) == 0
    assert capsys.readouterr().out.strip() != key


def test_a_keyed_side_channel_is_quick(ring, listen):
    key = make_key()
    client = ring("client", key)
    listener = listen(ring("server", key))
    took = []
    for _ in range(10):
        began = time.monotonic()
        assert isinstance(ask(listener.address, Who(), 5, client), EngineInfo)
        took.append(time.monotonic() - began)
    assert min(took) < 0.1
