"""`plan explain` says what the planner would do, from shapes alone."""

import argparse
import json

import pytest

from neuron_push import explain, shapes
from neuron_push.errors import ConfigError
from neuron_push.explain import Side
from neuron_push.shapes import PLATFORMS, known_models, load_model


def report(prefill, decode, model="Qwen/Qwen3-32B", ranks=(1, 1), sizes=(0, 0), **options):
    sides = [
        Side(PLATFORMS[name], count, size or PLATFORMS[name].block_tokens)
        for name, count, size in zip((prefill, decode), ranks, sizes, strict=True)
    ]
    return explain.explain(load_model(model), *sides, **options)


def run(capsys, *words):
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    status = explain.main(parser.parse_args(words))
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("prefill", "decode", "way"),
    [
        ("trn2", "p5en", "unpacked"),
        ("p5en", "trn2", "packed"),
        ("trn2", "trn2", "direct"),
        ("trn2", "trn2-block-first", "direct"),
        ("p5en", "p5en", "direct"),
        ("cpu", "p5en", "unpacked"),
    ],
)
def test_the_way_follows_from_layouts_and_from_who_can_reorder(prefill, decode, way):
    assert report(prefill, decode, ranks=(8, 8))["way"] == way


def test_many_short_copies_go_through_a_slab_although_they_could_go_direct():
    assert report("trn2", "cuda-before-0.28", sizes=(32, 32))["way"] == "direct"
    assert report("trn2", "cuda-before-0.28", ranks=(8, 8))["way"] == "unpacked"


def test_a_mixed_fleet_is_explained_in_numbers():
    found = report("trn2", "p5en", ranks=(64, 8))
    assert found["kv_bytes_per_token"] == 64 * 2 * 8 * 128 * 2
    assert found["per_pair"]["run_bytes"] == 32 * 128 * 2
    assert found["copies_per_1000_tokens"] == 8 * 64 * 2 * 1000 // 32
    assert found["per_pair"]["copies_per_1000_tokens"] == 64 * 2 * 1000 // 32 // 8
    assert found["bytes_per_1000_tokens"] == 1000 * found["kv_bytes_per_token"]
    assert found["staging"]["side"] == "decode"
    assert found["staging"]["slab_bytes"] <= found["staging"]["bytes_per_rank"]
    assert len(found["links"]) == 64 and found["idle_prefill_ranks"] == 0
    assert found["stripe"] == {"replicas": 8, "unit_tokens": 64}


def test_replicas_that_cannot_take_turns_are_idle_and_a_hint_says_why():
    found = report("trn2", "p5en", ranks=(16, 8), sizes=(1024, 1008), model="Qwen/Qwen3-8B")
    assert found["idle_prefill_ranks"] == 8 and found["stripe"]["replicas"] == 1
    assert any("meet too rarely to divide a prompt" in hint for hint in found["faster"])


def test_every_replica_on_decode_is_written():
    found = report("p5en", "trn2", ranks=(8, 64))
    assert [decode for _, decode in found["links"]].count(5) == 1 and len(found["links"]) == 64
    assert found["bytes_per_1000_tokens"] == 8 * 1000 * found["kv_bytes_per_token"]


def test_a_pair_that_cannot_talk_says_why_and_what_would_help(monkeypatch):
    fixed = dict(PLATFORMS)
    fixed["p5en"] = shapes.Platform("p5en", "", "interleaved", 16, False)
    monkeypatch.setattr(shapes, "PLATFORMS", fixed)
    found = explain.explain(
        load_model("Qwen/Qwen3-8B"), Side(PLATFORMS["trn2"], 1, 32), Side(fixed["p5en"], 1, 16)
    )
    assert not found["can_talk"]
    assert any("longest run common to both sides is 256 bytes" in why for why in found["reasons"])
    assert any("one side that can reorder" in hint for hint in found["faster"])


def test_what_would_be_faster_is_computed():
    found = report("trn2", "trn2", sizes=(128, 16))
    assert any(hint.startswith("decode blocks of 128 tokens: ") for hint in found["faster"])
    assert report("p5en", "p5en", sizes=(128, 128))["faster"] == []


def test_many_short_copies_go_from_slab_to_slab_where_both_sides_can_reorder():
    found = report("p5en", "p5en", sizes=(128, 16))  # direct: a million copies of 8 KiB
    assert found["way"] == "both" and found["faster"] == []
    staging = found["staging"]
    assert (staging["side"], staging["straight"]) == ("both", "direct")
    assert found["copies_per_1000_tokens"] == -(-1000 // staging["tokens_per_slab"])
    text = "\n".join(explain._lines(found))
    assert "talk     yes, packed by prefill and unpacked by decode" in text
    assert "16,777,216 bytes on each rank" in text and "go direct, piece by piece" in text


def test_the_command_prints_lines_or_json(capsys):
    words = ["--from", "trn2", "--to", "p5en", "--model", "Qwen/Qwen3-32B",
             "--prefill-tp", "64", "--decode-tp", "8", "--block-sizes", "32,16"]  # fmt: skip
    status, out = run(capsys, *words)
    assert status == 0
    assert "talk     yes, unpacked by decode" in out
    assert "prefill ranks 8-15 -> decode rank 1" in out
    assert "take turns every 64 tokens" in out
    status, out = run(capsys, *words, "--json")
    assert status == 0 and json.loads(out)["way"] == "unpacked"
    _, out = run(capsys, "--from", "p5en", "--to", "trn2", "--model", "Qwen/Qwen3-8B",
                 "--prefill-tp", "8", "--decode-tp", "64")  # fmt: skip
    assert "prefill rank 1 -> decode ranks 8-15" in out


def test_a_refusal_is_printed_and_fails(capsys):
    status, out = run(
        capsys, "--from", "trn2", "--to", "trn2", "--model", "Qwen/Qwen3-8B",
        "--min-run", "1000000000", "--block-sizes", "32,48",
    )  # fmt: skip
    assert (status, "talk     yes" in out) == (0, True)  # whole heads are never too short
    tiny = ["--from", "trn2", "--to", "p5en", "--block-sizes", "1024,16"]
    status, out = run(capsys, *tiny, "--model", "meta-llama/Llama-3.1-405B-Instruct")
    assert status == 1 and "talk     no" in out and "raise staging_slab_bytes" in out


@pytest.mark.parametrize("text", ["32", "a,b", "0,16", "1,2,3"])
def test_bad_block_sizes_are_refused(text, capsys):
    with pytest.raises(ConfigError, match="block-sizes"):
        run(capsys, "--from", "trn2", "--to", "trn2", "--model", "Qwen/Qwen3-8B",
            "--block-sizes", text)  # fmt: skip


@pytest.mark.parametrize("name", sorted(known_models()))
def test_every_known_model_has_a_geometry(name):
    model = load_model(name)
    (rank,) = shapes.geometries(model, PLATFORMS["trn2"], 1)
    planes = [plane for group in rank.groups for plane in group.planes]
    assert len({plane.layer for plane in planes}) == model.layers


def test_a_config_file_is_read_as_public_ones_are_written(tmp_path):
    config = {
        "text_config": {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "hidden_size": 256,
            "torch_dtype": "float16",
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json"):
        model = load_model(str(where))
        assert (model.kv_heads, model.head_size, model.element) == (4, 64, 2)
        assert model.windows == (9, 0, 9)
    assert load_model(str(tmp_path), "fp8").element == 1


def written(folder, **fields):
    """A config of four layers with these fields changed, added or (None) taken out."""
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256, **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return str(folder)


def test_windows_alternate_by_pattern_or_are_off(tmp_path):
    assert load_model("openai/gpt-oss-20b").windows[:4] == (128, 0, 128, 0)
    off = written(tmp_path, sliding_window=7, use_sliding_window=False)
    assert load_model(off).windows == (0, 0, 0, 0)
    assert load_model(written(tmp_path, sliding_window=7)).windows == (7, 7, 7, 7)


def test_layers_that_keep_a_state_have_no_kv_and_hold_degrees_together(tmp_path, capsys):
    kinds = ["mamba", "attention", "linear_attention", "full_attention"]
    for field in ("layer_types", "layers_block_type"):
        model = load_model(written(tmp_path, **{field: kinds}))
        assert (model.layers, model.states) == (2, 2)
    words = ["--from", "p5en", "--to", "p5en", "--model", str(tmp_path)]
    status, out = run(capsys, *words)
    assert status == 0 and "states   2 layers keep a state per request" in out
    status, out = run(capsys, *words, "--prefill-tp", "2")
    assert status == 1 and "both sides need the same parallel degree" in out
    with pytest.raises(ConfigError, match="no layer of it has attention"):
        load_model(written(tmp_path, layer_types=["mamba"] * 4))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"text_config": 5}', r"got `int` - at `\$.text_config`"),
        (b"{}", "missing required field `num_hidden_layers`"),
        (b'{"num_hidden_layers": NaN}', "got `float`"),
        (b'{"num_hidden_layers": 2}', "no num_key_value_heads or num_attention_heads"),
        (b'{"num_hidden_layers": 2, "num_attention_heads": 4}', "config has no hidden_size"),
        (b'{"num_hidden_layers": 2, "kv_lora_rank": 4}', "config has no qk_rope_head_dim"),
    ],
)
def test_a_config_that_is_unusable_is_refused_in_words(tmp_path, text, reason):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=reason):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 0}, ">= 1"),
        ({"num_hidden_layers": 2_000_000_000}, "<= 4096"),
        ({"num_hidden_layers": "x"}, r"got `str` - at `\$.num_hidden_layers`"),
        ({"num_attention_heads": 0}, r"at `\$.num_attention_heads`"),
        ({"hidden_size": 3}, "hidden_size is less than num_attention_heads"),
        ({"head_dim": -8}, r"at `\$.head_dim`"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is none of bfloat16"),
        ({"layer_types": 7}, r"at `\$.layer_types`"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 of 4 layers"),
        ({"sliding_window": -1}, r"at `\$.sliding_window`"),
    ],
)
def test_a_field_that_is_no_use_is_named(tmp_path, fields, reason):
    with pytest.raises(ConfigError, match=reason):
        load_model(written(tmp_path, **fields))


def test_a_model_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="is not in the table"):
        load_model("nobody/nothing")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--prefill-tp", "3"], "8 KV heads do not divide over 3 ranks"),
        (["--decode-tp", "0"], "a parallel degree is between 1 and 512, not 0"),
        (["--prefill-tp", "1000000000"], "a parallel degree is between"),
        (["--block-sizes", "16,9999999"], "a block has between 1 and 1048576 tokens"),
        (["--min-run", "0"], "--min-run must be positive"),
        (["--dtype", "int7"], "dtype 'int7' is none of"),
    ],
)
def test_a_figure_that_no_engine_has_is_refused(words, reason, capsys):
    with pytest.raises(ConfigError, match=reason):
        run(capsys, "--from", "trn2", "--to", "p5en", "--model", "Qwen/Qwen3-8B", *words)
