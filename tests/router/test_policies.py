"""Policies, alone and in simulated fleets of a thousand engines."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest

from neuron_push.errors import ConfigError
from neuron_push.protocol import Address
from neuron_push.router.engines import Engine
from neuron_push.router.fleet import Fleet, Incast, NoRoom
from neuron_push.router.jobs import Job
from neuron_push.router.places import Place
from neuron_push.router.policies import Affinity, PowerOfTwo, PrefixHash, RoundRobin, make
from tests.router.fleet import who

THOUSAND = 1000


def engines(leg, count, *, total=-1, block=0, weight=lambda n: 1.0, device=lambda n: ""):
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[leg]
    found = []
    for n in range(count):
        place = Place(f"http://{leg}{n}", Address("h", n), weight(n), device(n))
        engine = Engine(leg, place)
        sizes = {"free_blocks": total, "total_blocks": total, "block_tokens": block}
        engine.seen(who(f"{leg}{n}", role=role, **sizes))
        found.append(engine)
    return found


class Queues:
    """Prefill engines that compute prompts one after another, in virtual time."""

    def __init__(self, policy, count, seed, weight=lambda n: 1.0):
        self.engines = tuple(engines("prefill", count, weight=weight))
        self.policy = policy
        self.draw = random.Random(seed)
        self.free_at = dict.fromkeys(self.engines, 0.0)
        self.waits = []

    def run(self, requests, load):
        """Send prompts of very unlike lengths so that engines are busy for a share `load`."""
        now, done = 0.0, []
        speed = sum(engine.place.weight for engine in self.engines)
        for number in range(requests):
            tokens = round(self.draw.choice((500, 500, 500, 500, 8000)))
            now += self.draw.expovariate(load * speed / 2000)
            while done and done[0][0] <= now:
                _, _, engine, finished = heapq.heappop(done)
                engine.in_flight -= 1
                engine.tokens -= finished
            job = Job(prompt_tokens=tokens)
            engine = self.policy.choose(job, self.engines)
            begin = max(now, self.free_at[engine])
            self.free_at[engine] = begin + tokens / engine.place.weight
            self.waits.append(begin - now)
            engine.in_flight += 1
            engine.tokens += tokens
            heapq.heappush(done, (self.free_at[engine], number, engine, tokens))
        return sorted(self.waits)


def p99(values):
    return values[int(0.99 * len(values))]


@pytest.mark.parametrize("mixed", [False, True])
def test_two_choices_beat_round_robin_in_a_fleet_of_a_thousand(mixed):
    weight = (lambda n: 1.0 + n % 3) if mixed else (lambda n: 1.0)
    requests = 20_000
    turns = Queues(RoundRobin(), THOUSAND, 1, weight).run(requests, load=0.7)
    two = Queues(PowerOfTwo(random.Random(2)), THOUSAND, 1, weight).run(requests, load=0.7)
    print(f"waiting p99, in tokens: round robin {p99(turns):.0f}, two choices {p99(two):.0f}")
    assert p99(two) < 0.75 * p99(turns)
    assert sum(two) < 0.6 * sum(turns)


def test_admission_never_promises_more_blocks_than_there_are_where_round_robin_does():
    total, block = 100, 16
    worst = {}
    for name in ("round_robin", "power_of_two"):
        draw = random.Random(3)
        decode = engines("decode", THOUSAND // 2, total=total, block=block)
        fleet = Fleet(engines("prefill", THOUSAND // 2), decode,
                      decode_policy=make(name, draw=draw))  # fmt: skip
        live, taken, most, turned_away = [], Counter(), 0, 0
        for number in range(5000):
            job = Job(prompt_tokens=draw.choice((100, 100, 1200)), output_tokens=64)
            transfer = f"t{number}"
            if name == "round_robin":
                engine = decode[number % len(decode)]
            else:
                try:
                    engine = fleet.choose(job).decode
                except NoRoom:
                    turned_away += 1
                    continue
            engine.promise(transfer, job)
            taken[engine] += engine.blocks_of(job)
            most = max(most, taken[engine])
            live.append((engine, transfer, job))
            if len(live) > 1000:
                engine, transfer, job = live.pop(draw.randrange(len(live)))
                engine.forgive(transfer)
                taken[engine] -= engine.blocks_of(job)
        worst[name] = most
        # These would wait for room: three quarters of all blocks are in use, in large pieces.
        assert turned_away < 10
    print(f"blocks promised to one engine of {total}: {worst}")
    assert worst["power_of_two"] <= total < worst["round_robin"]


class Links:
    """Decode engines whose link is shared by the transfers into them, in virtual time.

    Up to 16 transfers share a link evenly; a receiver that is overrun loses throughput: half of it
    from twice as many on.
    """

    def __init__(self, incast, seed):
        self.decode = engines("decode", 4)
        self.fleet = Fleet(
            engines("prefill", THOUSAND - 4), self.decode, incast=incast,
            prefill_policy=PowerOfTwo(random.Random(seed)),
            decode_policy=PowerOfTwo(random.Random(seed + 1)),
        )  # fmt: skip
        self.left = {}  # transfer -> [pair, seconds of a whole link]
        self.waiting, self.done, self.most = [], 0, Counter()

    def run(self, bursts, burst, step=0.01):
        """Bursts of requests, a second apart; returns the virtual seconds until all are over."""
        now, begun = 0.0, 0
        while self.done < bursts * burst:
            if begun < bursts and now >= begun:
                self.waiting += [(begun, n) for n in range(burst)]
                begun += 1
            self._admit()
            self._move(step)
            now += step
        return now

    def _admit(self):
        while self.waiting:
            try:
                pair = self.fleet.choose(Job())
            except NoRoom:
                return
            for engine in (pair.prefill, pair.decode):
                engine.moving += 1
                engine.in_flight += 1
                self.most[engine.leg] = max(self.most[engine.leg], engine.moving)
            self.left[self.waiting.pop(0)] = [pair, 0.02]

    def _move(self, step):
        lost = {e: 1 + min(1.0, max(0, e.moving - 16) / 16) for e in self.decode}
        share = {e: step / e.moving / lost[e] for e in self.decode if e.moving}
        for transfer, entry in list(self.left.items()):
            pair = entry[0]
            entry[1] -= share[pair.decode]
            if entry[1] <= 0:
                del self.left[transfer]
                self.done += 1
                for engine in (pair.prefill, pair.decode):
                    engine.moving -= 1
                    engine.in_flight -= 1


def test_a_limit_on_transfers_keeps_links_from_being_overrun_and_starves_nobody():
    free, limited = Links(Incast(), 10), Links(Incast(into=16, out_of=2), 10)
    times = free.run(5, 400), limited.run(5, 400)
    print(f"2,000 transfers: {times[0]:.1f} s, at most {free.most}; with a limit of 16 into one "
          f"engine {times[1]:.1f} s, {limited.most}")  # fmt: skip
    assert limited.most["decode"] == 16 < free.most["decode"]
    assert limited.most["prefill"] <= 2
    assert times[1] < 0.7 * times[0]
    assert all(engine.moving == 0 for engine in limited.fleet.engines)


def test_a_limit_names_itself_when_nobody_may_take_more():
    fleet = Fleet(engines("prefill", 2), engines("decode", 2), incast=Incast(into=3, out_of=1))
    for engine in fleet.decode:
        engine.moving = 3
    with pytest.raises(NoRoom, match="3 transfers are under way at every decode engine"):
        fleet.choose()
    fleet.decode[1].moving = 2
    fleet.prefill[0].moving = 1
    pair = fleet.choose()
    assert (pair.prefill, pair.decode) == (fleet.prefill[1], fleet.decode[1])


def test_equal_prefixes_meet_the_same_engine_and_no_engine_drowns():
    fleet = tuple(engines("prefill", THOUSAND))
    policy = PrefixHash(PowerOfTwo(random.Random(4)))
    systems = [f"You are assistant number {n}. " * 60 for n in range(300)]
    homes = {}
    draw, hits, sent = random.Random(5), 0, 0
    live = []
    for _ in range(6000):
        system = draw.choice(systems)
        job = Job.of({"prompt": system + str(draw.random())}, 1200)
        engine = policy.choose(job, fleet)
        hits += homes.get(system) is engine
        homes.setdefault(system, engine)
        sent += 1
        engine.tokens += job.prompt_tokens
        live.append((engine, job.prompt_tokens))
        if len(live) > 500:
            engine, tokens = live.pop(0)
            engine.tokens -= tokens
    print(f"prompts that met their prefix again: {hits / sent:.0%}")
    assert hits / sent > 0.9
    hot = policy.choose(Job.of({"prompt": systems[0]}, 60_000), fleet)
    hot.tokens += 10_000_000
    assert policy.choose(Job.of({"prompt": systems[0]}, 60_000), fleet) is not hot


def test_an_engine_that_leaves_takes_only_its_own_prefixes_along():
    fleet = tuple(engines("prefill", 100))
    policy = PrefixHash(PowerOfTwo(random.Random(6)))
    jobs = [Job(body={"prompt": f"p{n}"}) for n in range(500)]
    before = [policy.choose(job, fleet) for job in jobs]
    left = PrefixHash(PowerOfTwo(random.Random(6)))
    after = [left.choose(job, fleet[1:]) for job in jobs]
    moved = sum(one is not two for one, two in zip(before, after, strict=True))
    assert moved == sum(one is fleet[0] for one in before)
    # One that is left out for a single job is passed over without a ring of its own.
    assert [policy.choose(job, fleet[1:]) for job in jobs] == after


def test_a_session_keeps_its_engine_and_others_go_by_load():
    fleet = tuple(engines("decode", 50))
    policy = Affinity(PowerOfTwo(random.Random(7)))
    assert len({policy.choose(Job(session="s"), fleet).place.url for _ in range(20)}) == 1
    assert len({policy.choose(Job(), fleet).place.url for _ in range(50)}) > 20


def test_weights_share_work():
    fleet = tuple(engines("prefill", 2, weight=lambda n: 1.0 + 2 * n))
    policy, shares = PowerOfTwo(random.Random(8)), Counter()
    for _ in range(400):
        engine = policy.choose(Job(), fleet)
        engine.in_flight += 1
        shares[engine.place.weight] += 1
    assert shares == {1.0: 100, 3.0: 300}


def test_preferred_device_pairs_are_taken_until_they_are_full():
    prefill = engines("prefill", 4, device=lambda n: ("trn2", "p5en")[n % 2])
    decode = engines("decode", 2, device=lambda n: "p5en")
    policy = make("power_of_two", [("trn2", "p5en")], random.Random(9))
    fleet = Fleet(prefill, decode, prefill_policy=policy)
    assert {fleet.choose().prefill.device for _ in range(20)} == {"trn2"}
    for engine in prefill:
        engine.tokens = 1_000_000 if engine.device == "trn2" else 0
    assert fleet.choose().prefill.device == "p5en"


def test_an_engine_says_its_device_itself_unless_the_operator_does():
    engine = Engine("prefill", Place("http://a", Address("h", 1)))
    engine.seen(who("a", software=(("device", "trn2"),)))
    assert engine.device == "trn2"
    told = Engine("prefill", Place("http://a", Address("h", 1), device="p5en"))
    told.seen(engine.info)
    assert told.device == "p5en"


def test_unknown_policies_are_refused():
    with pytest.raises(ConfigError, match="power_of_two"):
        make("fastest")


def test_choosing_among_a_thousand_costs_little():
    import time

    fleet = Fleet(engines("prefill", 500), engines("decode", 500, total=1000, block=16))
    fleet.choose()
    began = time.perf_counter()
    for _ in range(1000):
        fleet.choose(Job(prompt_tokens=100))
    each = (time.perf_counter() - began) / 1000
    print(f"one choice of a pair among 500 x 500: {each * 1e6:.0f} us")
    assert each < 0.001
