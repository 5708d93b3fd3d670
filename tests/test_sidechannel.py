"""Server, client, blocking and asynchronous questions, and the engine's listener."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
import zmq

from neuron_push.errors import (
    ConfigError,
    Disconnected,
    PeerError,
    ProtocolError,
    Refused,
    TransportError,
)
from neuron_push.geometry import Geometry, Semantics
from neuron_push.limits import LIMITS
from neuron_push.ports import free_ports
from neuron_push.protocol import (
    VERSION,
    Address,
    Announce,
    Announced,
    EngineInfo,
    RankInfo,
    Refusal,
    Welcome,
    Who,
    decode_side_channel,
    encode,
)
from neuron_push.sidechannel import Client, Listener, Server, ask, ask_async
from neuron_push.sidechannel.sockets import endpoint

HEADER = b"NP" + bytes([VERSION])

HOST = "127.0.0.1"
SEMANTICS = Semantics("tiny", 2, 2, 16, "float32", ("full",))
WELCOME = Welcome("p", 0, 1, "p/0/1/1", b"\x00" * 10)


@pytest.fixture
def server():
    server = Server(HOST, 0)
    yield server
    server.close()


@pytest.fixture
def client():
    client = Client()
    yield client
    client.close()


def until(done, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := done():
            return found
    raise AssertionError(f"nothing within {seconds} s")


def answer_of(client, serve=lambda: None):
    """Poll until the client has one outcome, calling `serve` between."""

    def turn():
        serve()
        return client.poll(time.monotonic())

    ((_, outcome),) = until(turn)
    return outcome


def put(client, address, message=None, timeout=5.0, key="q"):
    client.ask(key, address, message or Who(), timeout, time.monotonic())


class Raw:
    """A peer that sends whatever it likes."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://{address.host}:{address.port}")

    def exchange(self, server, *frames):
        self.socket.send_multipart(frames)

        def turn():
            assert server.poll() == []
            try:
                return self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None

        return decode_side_channel(until(turn))

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def raw(server):
    raw = Raw(server.address)
    yield raw
    raw.close()


@pytest.fixture
def silent_port():
    """A TCP port that accepts and says nothing."""
    with socket.create_server((HOST, 0)) as listening:
        yield listening.getsockname()[1]


# --- server --------------------------------------------------------------------------------


def test_a_question_is_answered(server, client):
    put(client, server.address)

    def serve():
        for request in server.poll():
            assert request.message == Who()
            request.answer(WELCOME)

    assert answer_of(client, serve) == WELCOME
    assert len(client) == 0 and server.rejected == 0


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "not a neuron-push message"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "not a neuron-push message"),
        ([HEADER + b"\xff\xff"], "malformed"),
        ([HEADER], "malformed"),
        ([b"NP\x00" + encode(Who())[3:]], f"protocol version 0 is not {VERSION}"),
        ([b"NP\x63" + encode(Who())[3:]], "protocol version 99"),
        ([encode(Who()), b"more"], "one frame"),
        ([b"\x00" * (LIMITS.side_channel + 1)], "limits.side_channel is"),
    ],
    ids=["empty", "http", "garbage", "no body", "old", "new", "two frames", "oversized"],
)
def test_what_is_no_message_is_refused_and_counted(server, raw, client, frames, reason):
    answer = raw.exchange(server, *frames)
    assert isinstance(answer, Refusal) and reason in answer.reason
    assert server.rejected == 1
    put(client, server.address)
    answer_of(client, lambda: [request.answer(WELCOME) for request in server.poll()])


def test_a_frame_far_over_the_limit_is_not_even_read(server, raw, client):
    raw.socket.send(b"\x00" * (2 * LIMITS.side_channel))
    put(client, server.address)
    answer_of(client, lambda: [request.answer(WELCOME) for request in server.poll()])
    assert server.rejected == 0


def test_an_answer_to_somebody_who_left_is_dropped(server, client):
    put(client, server.address)
    (request,) = until(server.poll)
    client.forget("q")
    client.forget("q")
    request.answer(WELCOME)
    request.answer(WELCOME)
    assert client.poll(time.monotonic()) == []


def test_an_answer_over_the_limit_is_our_own_mistake(server, client):
    put(client, server.address)
    (request,) = until(server.poll)
    large = Welcome("p", 0, 1, "p", b"\x00" * LIMITS.side_channel)
    with pytest.raises(ProtocolError, match=r"limits\.side_channel is"):
        request.answer(large)
    with pytest.raises(ProtocolError, match=r"limits\.side_channel is"):
        put(client, server.address, large, key="other")


def test_a_taken_port_is_a_configuration_error():
    (port,) = free_ports(1)
    server = Server(HOST, port)
    with pytest.raises(ConfigError, match=r"taken; choose another side_channel_port$"):
        Server(HOST, port)
    server.close()


def test_a_port_that_an_outgoing_connection_has_is_explained(silent_port, monkeypatch):
    with socket.create_connection((HOST, silent_port)) as outgoing:
        port = outgoing.getsockname()[1]
        lent = range(port - 5, port + 6)
        monkeypatch.setattr("neuron_push.ports.ephemeral", lambda: lent)
        expected = f"taken; .* none of {port - 5} to {port + 5}: outgoing connections"
        with pytest.raises(ConfigError, match=expected):
            Server(HOST, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_a_configuration_error(host):
    with pytest.raises(ConfigError, match=host):
        Server(host, 0)


def test_a_host_name_may_be_given():
    server = Server("localhost", 0)
    assert server.address.host == "localhost" and server.address.port
    server.close()
    server.close()


def test_a_server_may_be_restarted_on_its_port(client):
    address = Address(HOST, *free_ports(1))
    for _ in range(3):
        server = Server(HOST, address.port)
        put(client, address)
        assert answer_of(client, lambda s=server: [r.answer(WELCOME) for r in s.poll()]) == WELCOME
        server.close()


# --- client --------------------------------------------------------------------------------


def test_a_hundred_questions_at_once_find_their_own_answers(server, client):
    for number in range(100):
        put(client, server.address, Welcome("d", number, 1, "", b""), key=number)
    answers = {}

    def turn():
        for request in server.poll():
            request.answer(Welcome("p", request.message.rank, 1, "", b""))
        answers.update(client.poll(time.monotonic()))
        return len(answers) == 100

    until(turn)
    assert all(answers[number].rank == number for number in range(100))


def test_questions_are_bounded_and_keys_are_unique(silent_port, client):
    address = Address(HOST, silent_port)
    for number in range(LIMITS.questions):
        put(client, address, key=number)
    with pytest.raises(ProtocolError, match="still open"):
        put(client, address, key=0)
    with pytest.raises(TransportError, match="open already"):
        put(client, address, key="one more")


def test_a_refusal_is_an_outcome_with_the_reason(server, client):
    put(client, server.address)
    outcome = answer_of(client, lambda: [r.answer(Refusal("no")) for r in server.poll()])
    assert isinstance(outcome, Refused) and outcome.reason == "no"
    assert str(server.address.port) in str(outcome)


def test_silence_ends_at_the_deadline_with_a_hint(silent_port, client):
    client.ask("q", Address(HOST, silent_port), Who(), 5.0, 100.0)
    assert client.poll(104.9) == []
    ((key, outcome),) = client.poll(105.0)
    assert key == "q" and isinstance(outcome, TransportError)
    assert f"no answer from {HOST}:{silent_port} within 5 s" in str(outcome)
    assert "is the port its side-channel port?" in str(outcome)


def test_a_server_that_never_answers_ends_at_the_deadline(server):
    with pytest.raises(TransportError, match=r"within 0\.2 s"):
        ask(server.address, Who(), 0.2)


def test_a_port_where_nobody_listens_is_noticed_at_once(client):
    start = time.monotonic()
    put(client, Address(HOST, *free_ports(1)), timeout=60)
    outcome = answer_of(client)
    assert isinstance(outcome, Disconnected) and "refused the connection" in str(outcome)
    assert time.monotonic() - start < 5


def test_a_web_server_is_not_taken_for_a_side_channel(client):
    with socket.create_server((HOST, 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 4)
                connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        put(client, Address(HOST, listening.getsockname()[1]), timeout=60)
        outcome = answer_of(client)
        client.close()
        thread.join()
    assert isinstance(outcome, TransportError) and "not a side channel" in str(outcome)


def test_a_server_that_dies_over_a_question_is_noticed(server, client):
    put(client, server.address, timeout=60)
    until(server.poll)
    server.close()
    outcome = answer_of(client)
    assert isinstance(outcome, Disconnected) and "without an answer" in str(outcome)


def test_an_unreadable_answer_is_the_peers_fault(client):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    for bad in ([b"nonsense"], [HEADER, b"two"]):
        put(client, Address(HOST, port))
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, *bad])
        outcome = answer_of(client)
        assert type(outcome) is PeerError and str(port) in str(outcome)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "address",
    [
        Address(HOST, 0),
        Address(HOST, -1),
        Address(HOST, 65536),
        Address("", 5600),
        Address("1.2.3.4;5.6.7.8", 5600),
        Address("host:1/../x", 5600),
        Address("ipc://x", 5600),
        Address("a b", 5600),
        Address("x" * 2000, 5600),
    ],
)
def test_what_is_no_address_is_not_asked(client, address):
    with pytest.raises(TransportError, match="is not a"):
        put(client, address)
    assert len(client) == 0


def test_addresses_are_written_as_zeromq_reads_them():
    assert endpoint(Address("10.0.0.1", 1)) == "10.0.0.1:1"
    assert endpoint(Address("fd00::1", 1)) == "[fd00::1]:1"
    assert endpoint(Address("node-1.cluster.local", 1)) == "node-1.cluster.local:1"


def test_closing_a_client_drops_its_questions(silent_port):
    client = Client()
    put(client, Address(HOST, silent_port))
    client.close()
    client.close()
    assert len(client) == 0 and client.sockets == []


# --- listener ------------------------------------------------------------------------------


def info(**changes):
    values = {
        "engine": "engine-1",
        "incarnation": 5,
        "role": "producer",
        "world": 2,
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "data_rank": 0,
        "modes": ("push",),
        "semantics": SEMANTICS,
        "ranks": (),
    }
    return EngineInfo(**{**values, **changes})


def announce(rank=0, incarnation=1, engine="engine-1", semantics=SEMANTICS):
    geometry = Geometry(regions=(), groups=(), element_bytes=4)
    rank_info = RankInfo(rank, incarnation, Address(HOST, 7000 + rank), geometry)
    return Announce(engine, rank_info, semantics)


@pytest.fixture
def listener():
    listener = Listener("engine-1", HOST, *free_ports(1), info)
    yield listener
    listener.close()


def test_a_listener_says_who_the_engine_is(listener):
    assert ask(listener.address, Who(), 5) == info()


async def test_a_router_may_ask_without_blocking_its_loop(listener):
    answers = await asyncio.gather(*(ask_async(listener.address, Who(), 5) for _ in range(20)))
    assert answers == [info()] * 20


async def test_asynchronous_questions_fail_as_others_do(silent_port):
    with pytest.raises(TransportError, match="within"):
        await ask_async(Address(HOST, silent_port), Who(), 0.2)
    with pytest.raises(Disconnected):
        await ask_async(Address(HOST, *free_ports(1)), Who(), 5)


async def test_an_asynchronous_question_may_be_cancelled(silent_port):
    task = asyncio.create_task(ask_async(Address(HOST, silent_port), Who(), 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_announced_ranks_appear_in_order_and_new_incarnations_replace_old(listener):
    for each in (announce(1), announce(0), announce(1, incarnation=9)):
        assert ask(listener.address, each, 5) == Announced()
    expected = (announce(0).info, announce(1, incarnation=9).info)
    assert listener.ranks() == expected
    assert ask(listener.address, Who(), 5).ranks == expected


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (announce(engine="engine-2"), "this is engine engine-1, not engine-2"),
        (announce(rank=-1), "out of range"),
        (announce(rank=1 << 20), "out of range"),
        (WELCOME, "Welcome belongs to one of its ranks"),
    ],
)
def test_a_listener_refuses_what_is_not_for_it(listener, message, reason):
    with pytest.raises(Refused, match=reason):
        ask(listener.address, message, 5)
    assert listener.ranks() == ()


def test_ranks_with_unlike_caches_are_refused(listener):
    other = Semantics("tiny", 2, 2, 16, "bfloat16", ("full",))
    ask(listener.address, announce(0), 5)
    with pytest.raises(Refused, match="ranks 0 and 1 hold unlike caches: dtype float32 and bf"):
        ask(listener.address, announce(1, semantics=other), 5)
    assert len(listener.ranks()) == 1
    assert ask(listener.address, announce(0, semantics=other), 5) == Announced()


def test_a_description_that_fails_is_refused_logged_and_survived(caplog):
    failures = iter([True, False])

    def describe():
        if next(failures):
            raise RuntimeError("secret detail")
        return info()

    listener = Listener("engine-1", HOST, 0, describe)
    with pytest.raises(Refused, match="its log says why") as refusal:
        ask(listener.address, Who(), 5)
    assert "secret" not in refusal.value.reason
    assert "secret detail" in caplog.text
    assert ask(listener.address, Who(), 5) == info()
    listener.close()


def test_a_listener_frees_its_port_and_its_thread(listener):
    address = listener.address
    listener.close()
    listener.close()
    again = Listener("engine-1", HOST, address.port, info)
    assert ask(address, Who(), 5) == info()
    again.close()
    assert not [t for t in threading.enumerate() if t.name == "neuron-push-listener"]


def test_a_listener_that_cannot_listen_says_so_where_it_is_made(listener):
    with pytest.raises(ConfigError, match="taken"):
        Listener("engine-2", HOST, listener.address.port, info)
