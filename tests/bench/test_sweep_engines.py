"""Which engines a sweep makes of its fleet file, and how the command reads its options."""

from types import SimpleNamespace

import pytest

from neuron_push.bench.sweep import command, engines, results
from neuron_push.bench.sweep.cells import Cell, Run
from neuron_push.bench.sweep.churn import answers
from neuron_push.bench.sweep.columns import KINDS
from neuron_push.bench.sweep.measure import RunFailed
from neuron_push.cli import make_parser
from neuron_push.config import Config
from neuron_push.emulation import fleet, models
from neuron_push.errors import ConfigError, NeuronPushError
from tests.bench.kit import write

TEMPLATE = engines.Template.of(fleet.load(command.SHIPPED))


def options(*words):
    return make_parser(["bench", "sweep"]).parse_args(["bench", "sweep", *words])


@pytest.mark.parametrize("path", [command.SHIPPED, command.SPARSE], ids=lambda p: p.stem)
def test_the_shipped_fleets_say_what_they_hold(path):
    template = engines.Template.of(fleet.load(path))
    shape = models.FAMILIES[template.model]
    per_token = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    assert 2 * per_token == command.KV_BYTES[template.model]
    assert template.prefill.max_batched == 2048


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_connector_differs_from_column_to_column(kind):
    spec = engines._spec(TEMPLATE.decode, kind)
    assert spec.name == f"{kind}-decode" and spec.connector == KINDS[kind].connector
    for field in ("profile", "blocks", "max_batched", "max_seqs", "arguments", "environment"):
        assert getattr(spec, field) == getattr(TEMPLATE.decode, field)
    expected = "none" if kind == "decode-bench" else "sampled"  # its KV follows no pattern
    assert spec.verify == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_of_every_kind_are_ones_that_the_connector_has(kind):
    if KINDS[kind].connector == "neuron-push":
        Config.parse(KINDS[kind].settings, {})


def test_memory_of_all_pairs_is_known_before_they_start():
    one = engines.memory_needed(["ours"], TEMPLATE, 32 << 10)
    assert one == 2 * engines.OVERHEAD + (2560 + 3584) * 16 * (32 << 10)
    assert engines.memory_needed(["ours", "nixl-push"], TEMPLATE, 32 << 10) == 2 * one
    assert engines.memory_needed(["decode-bench"], TEMPLATE, 32 << 10) < one
    assert engines.memory_free() > 1 << 20


def test_the_floor_of_ttft_adds_the_last_chunks_copy_and_a_decode_step():
    # 50 GB/s and 15 us; 5.6 ms.
    whole, rest = (command._added(TEMPLATE, Cell(n, 1.0, 1)) for n in (16384, 2048 + 100))
    assert whole == pytest.approx(2048 * 32768 / 50e9 + 15e-6 + 5.6e-3)
    assert rest == pytest.approx(100 * 32768 / 50e9 + 15e-6 + 5.6e-3)


def test_a_fleet_of_other_engines_is_refused():
    spec = fleet.FleetSpec(engines=(TEMPLATE.prefill,))
    with pytest.raises(ConfigError, match="one prefill and one decode"):
        engines.Template.of(spec)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--columns", "pushh"], "known"),
        (["--cells", "4k"], "4kx8"),
        (["--repeats", "0"], "positive"),
        (["--cells", "64kx1"], "do not fit the prefill engine"),
        (["--prefill-url", "http://h:1"], "its columns"),
        (["--prefill-url", "http://h:1", "--columns", "push", "nixl-push"], "its columns"),
        (["--prefill-url", "http://h:1", "--columns", "push"], "--model"),
        (["--prefill-url", "http://h:1", "--columns", "push", "--model", "m"], "--decode-url"),
        (["--prefill-url", "http://h:1", "--columns", "floor-tpot", "--model", "m"], "-tpot needs"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(tmp_path, words, reason):
    with pytest.raises(ConfigError, match=reason):
        command.main(options("--out", str(tmp_path), *words))


def test_a_running_engine_is_named_by_its_url():
    engine = command._engine("http://10.0.0.1:8100#side=5601&name=p&tp=8")
    assert (engine.url, engine.host, engine.side_port) == ("http://10.0.0.1:8100", "10.0.0.1", 5601)
    assert (engine.name, engine.tp) == ("p", 8)
    assert command._engine("http://d:8200").url == "http://d:8200"
    with pytest.raises(ConfigError, match="http://d:1#side=x"):
        command._engine("http://d:1#side=x")


def test_a_run_that_fails_twice_is_told_and_the_next_one_follows(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(tools, run, sides):
        asked.append(run.column)
        if run.column == "pull":
            raise RunFailed("3 of 4: no room")
        return results.read(write(tmp_path, run.column, run.cell, run.repeat, 0.1)).neuron_push

    monkeypatch.setattr(command, "measure", measure)
    tools = SimpleNamespace(folder=tmp_path, setup={})
    runs = [Run(column, Cell(64, 1.0, 8), 1) for column in ("pull", "push")]
    args = SimpleNamespace(seconds=1.0, out=tmp_path)
    assert command._all(args, tools, runs, lambda run: None) == 1
    assert asked == ["pull", "pull", "push"]
    said = capsys.readouterr().out
    assert "failed, once more: 3 of 4: no room" in said and "1 runs unfit or failed" in said
    assert results.finished(tmp_path, runs[1]) and not results.finished(tmp_path, runs[0])


@pytest.mark.parametrize(("blocks", "size", "at_once"), [(2560, 16, 8), (4096, 16, 32), (9, 32, 2)])
def test_answers_that_scatter_blocks_fill_the_pool_without_running_out(blocks, size, at_once):
    sizes = answers(blocks, size, at_once)
    held = sum(-(-(prompt + count) // size) for prompt, count in sizes)
    assert blocks - 1 - 2 * at_once <= held <= blocks - 1 - at_once
    assert len({prompt for prompt, _ in sizes}) == min(at_once, size - 1) or at_once > size - 1
    assert all(prompt > 0 and count > 0 for prompt, count in sizes)


def test_a_pool_too_small_to_scatter_is_said_to_be_so():
    with pytest.raises(NeuronPushError, match="too few"):
        answers(16, 16, 8)
