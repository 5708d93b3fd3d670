"""People: through the router, past it, patient or not, honest or not."""

from __future__ import annotations

import asyncio
import json

from aiohttp import ClientError, ClientTimeout, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.test_utils import make_mocked_request

from tests.stack.device import Golden
from tests.stack.http import tokens_in


class Collector(AbstractStreamWriter):
    """What the router sends to one client."""

    def __init__(self) -> None:
        self.raw = b""

    async def write(self, chunk) -> None:
        self.raw += bytes(chunk)

    async def write_eof(self, chunk=b"") -> None:
        self.raw += chunk

    async def drain(self) -> None: ...
    def enable_compression(self, *_, **__) -> None: ...
    def enable_chunking(self) -> None: ...
    async def write_headers(self, status_line, headers) -> None: ...
    def send_headers(self) -> None: ...


class Client:
    """One request, its end, and whether that is right."""

    def __init__(self, world, number: int) -> None:
        self.world, self.number = world, number
        rng = world.clock.rng
        self.prompt = world.prompt()
        self.output = rng.choice([1, 2, 5, 20])
        self.stream = rng.random() < 0.5
        self.reason, self.ended = "", ""
        kinds = world.profile.clients
        self.kind = rng.choices(list(kinds), list(kinds.values()))[0]
        name = f"id{rng.randrange(3)}" if world.clock.chance(0.2) else f"r{number}"
        self.headers = {"X-Request-Id": name}
        if world.clock.chance(0.3):
            self.headers["X-Neuron-Push-Deadline-Ms"] = str(rng.choice([50, 500, 2500]))
        self.task = None

    def __str__(self) -> str:
        return f"client {self.number} ({self.kind}, {len(self.prompt)} tokens)"

    def start(self) -> None:
        world = self.world
        self.task = world.loop.create_task(getattr(self, "_" + self.kind)())
        self.task.add_done_callback(self._done)
        if world.clock.chance(world.profile.leave):
            delay = world.clock.rng.choice([0.0, world.clock.wait(0.02), world.clock.wait(0.2)])
            world.clock.at(delay, "client", self._leave)

    def _leave(self) -> bool:
        if self.task.done():
            return False
        self.world.clock.log(f"{self} leaves")
        return self.task.cancel()

    def _done(self, task) -> None:
        if task.cancelled():
            self.ended = "left"
        elif error := task.exception():
            self.ended = f"{type(error).__name__}: {error}"
            if not isinstance(error, (ClientError, TimeoutError, OSError)):
                self.world.broken.append(error)
        else:
            self.ended = self.reason
        self.world.clock.log(f"{self} ended: {self.ended[:60]}")
        self.world.outcomes[self.ended.split(":")[0]] += 1

    def body(self, **more) -> bytes:
        return json.dumps(
            {"prompt": self.prompt, "max_tokens": self.output, "stream": self.stream, **more}
        ).encode()

    def judge(self, status: int, raw: bytes) -> None:
        """A whole answer is right to the last token; a part of one is right as far as it goes."""
        tokens, ended = tokens_in(raw)
        golden, start = Golden.of(self.prompt), len(self.prompt)
        wanted = [golden.token(start + index) for index in range(self.output)]
        world = self.world
        world.clock.check(
            tokens == wanted[: len(tokens)], f"{self} was told {tokens}, not {wanted}"
        )
        if ended == "length":
            world.clock.check(len(tokens) == self.output, f"{self} was told {len(tokens)} tokens")
        self.reason = ended if status == 200 else f"HTTP {status}: {raw[:300].decode()}"
        self.reason = self.reason or "cut short"

    async def _ask(self, engine: str, body: bytes) -> tuple[int, bytes]:
        """Past the router."""
        limit = ClientTimeout(total=8.0)
        answer = await self.world.session.post(
            f"http://{engine}:8000/v1/completions", data=body, headers=self.headers, timeout=limit
        )
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()

    # ------------------------------------------------------------------ kinds

    async def _routed(self) -> None:
        """Through the router; again under the same id where it is to blame, as clients do."""
        for _ in range(4):
            status = await self._once()
            if status < 500:
                return
            await asyncio.sleep(self.world.clock.rng.uniform(0.05, 0.4))

    async def _once(self) -> int:
        """The router's real handler."""
        payload = StreamReader(QUIET, 2**16, loop=self.world.loop)
        payload.feed_data(self.body())
        payload.feed_eof()
        writer = Collector()
        request = make_mocked_request(
            "POST", "/v1/completions", headers=self.headers, payload=payload, writer=writer,
            client_max_size=1 << 20, loop=self.world.loop, app=APP, protocol=QUIET, transport=QUIET,
        )  # fmt: skip
        response = await self.world.router.complete(request)
        raw = writer.raw or getattr(response, "body", None) or b""
        self.judge(response.status, raw)
        return response.status

    async def _sequential(self) -> None:
        """As a proxy for vLLM's pull connector: prefill, then decode with what it answered."""
        prefill, decode = self.world.pick()
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        body = self.body(max_tokens=1, stream=False, kv_transfer_params=ask)
        status, raw = await self._ask(prefill, body)
        if status != 200:
            self.reason = f"HTTP {status}: prefill"
            return
        params = json.loads(raw).get("kv_transfer_params")
        self.judge(*await self._ask(decode, self.body(kv_transfer_params=params)))

    async def _repeater(self) -> None:
        """Both legs under one id, given up and sent again while the engines may be at it."""
        rng = self.world.clock.rng
        common = {"transfer_id": f"again{self.number}"} if rng.random() < 0.7 else {}
        for _ in range(4):
            params = {**self._params(), **common}
            if not common:
                del params["transfer_id"]  # the legs meet by their requests' id
            ask = {"do_remote_decode": True, **common}
            first = self.body(max_tokens=1, stream=False, kv_transfer_params=ask)
            legs = [
                asyncio.ensure_future(self._ask(params["remote_host"], first)),
                asyncio.ensure_future(
                    self._ask(self.world.pick()[1], self.body(kv_transfer_params=params))
                ),
            ]
            try:
                async with asyncio.timeout(rng.choice([0.01, 0.03, 0.1, 5.0])):
                    answers = await asyncio.gather(*legs)
            except (TimeoutError, ClientError, OSError):
                self.reason = "gave up"
                continue
            finally:
                for leg in legs:
                    leg.cancel()
            self.judge(*answers[1])
            if answers[1][0] == 200:
                return

    async def _orphan(self) -> None:
        """A decode leg whose prefill never comes."""
        params = {**self._params(), "transfer_id": f"nobody{self.number}", "deadline_ms": 700}
        self.judge(*await self._ask(self.world.pick()[1], self.body(kv_transfer_params=params)))

    async def _widow(self) -> None:
        """A prefill leg whose decode never comes."""
        params = {"do_remote_decode": True, "transfer_id": f"w{self.number}"}
        await self._ask(self.world.pick()[0], self.body(stream=False, kv_transfer_params=params))
        self.reason = "nobody asked"

    async def _plain(self) -> None:
        """Served by one engine alone."""
        self.judge(*await self._ask(self.world.pick()[1], self.body()))

    async def _hostile(self) -> None:
        """Parameters that no router would send."""
        rng = self.world.clock.rng
        params = self._params()
        for _ in range(rng.randint(1, 3)):
            name = rng.choice([*params, "deadline_ms", "transfer_mode", "remote_block_ids"])
            params[name] = rng.choice(
                [None, True, -1, 0, 2**70, "", "x" * 5000, "pull", "push", [], [[1, 2]], {}, 0.5]
            )
        engine = rng.choice(self.world.pick())
        self.judge(*await self._ask(engine, self.body(kv_transfer_params=params)))

    def _params(self) -> dict:
        prefill = self.world.pick()[0]
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": prefill,
            "remote_host": prefill, "remote_port": 5600, "transfer_id": f"t{self.number}",
            "remote_request_id": "", "deadline_ms": 1500,
        }  # fmt: skip


class _Quiet:
    """Protocol and transport under a body that is here already."""

    _reading_paused = False
    ssl_context = peername = sockname = None

    def pause_reading(self, **_) -> None: ...
    def resume_reading(self, **_) -> None: ...
    def close(self) -> None: ...
    def get_extra_info(self, *_) -> None: ...


QUIET = _Quiet()
APP = web.Application()
APP.freeze()
