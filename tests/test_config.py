"""A config keeps released files intact, refuses what contradicts itself, and names field, value and rule."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from tinyds41 import Config, preset_names

GOLDEN = Path(__file__).parent / "golden"
NANO = Config.preset("nano")


def fields_declared(kind: str) -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if str(f.type).removesuffix(" | None") == kind]


def expect_refusal(message: str, **changes):
    """`nano` with these changes is refused; every part of the message, separated by ' .. ', appears in order."""
    with pytest.raises(ValueError) as caught:
        NANO.replace(**changes)
    rest = str(caught.value)
    for part in message.split(" .. "):
        assert part in rest, f"{part!r} is missing in {caught.value}"
        rest = rest[rest.index(part) + len(part):]  # fmt: skip


# --- The schedule: each message names the field, the layer and the rule. `nano` has ratios 0 0 2 2 1 1 1 1,
# --- kv sources 2 and 4, index sources 2, 4 and 6, candidate source 4.


def test_every_layer_needs_a_ratio():
    expect_refusal("compress_ratios has 7 entries .. num_hidden_layers=8 .. every layer needs one",
                   compress_ratios=(0, 0, 2, 2, 1, 1, 1))  # fmt: skip


def test_a_ratio_is_not_negative():
    expect_refusal("compress_ratios .. -2 .. 0 (window only) or positive", compress_ratios=(0, 0, 2, -2, 1, 1, 1, 1))


def test_a_kv_source_needs_a_ratio():
    expect_refusal("kv_source_layer_ids names layer 1 .. ratio > 0", kv_source_layer_ids=(1, 2, 4),
                   index_source_layer_ids=(1, 2, 4, 6))  # fmt: skip


def test_an_index_source_needs_a_ratio():
    expect_refusal("index_source_layer_ids names layer 1 .. ratio > 0", index_source_layer_ids=(1, 2, 4, 6))


def test_a_compressed_layer_needs_a_source_at_or_before_it():
    expect_refusal("compress_ratios gives layer 1 ratio 2 .. kv_source_layer_ids=[2, 4] has no source",
                   compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1))  # fmt: skip


def test_a_compressed_layer_needs_a_source_of_its_own_ratio():
    expect_refusal("compress_ratios gives layer 3 ratio 4 .. kv_source_layer_ids=[2, 4] has no source of ratio 4",
                   compress_ratios=(0, 0, 2, 4, 1, 1, 1, 1))  # fmt: skip


def test_every_kv_source_is_an_index_source():
    expect_refusal("kv_source_layer_ids names layer 4, index_source_layer_ids does not .. is an index source",
                   index_source_layer_ids=(2, 6))  # fmt: skip


def test_the_candidate_source_is_a_kv_source():
    for layer in (6, 0, -1, 8):
        expect_refusal(f"candidate_source_layer_id={layer} .. kv_source_layer_ids=[2, 4] .. is a kv source",
                       candidate_source_layer_id=layer)  # fmt: skip


def test_a_pool_needs_a_block_of_at_least_one_entry():
    expect_refusal("candidate_topk_blocks=0 .. at least one block", candidate_topk_blocks=0)
    expect_refusal("candidate_block_size=0 .. one entry", candidate_block_size=0)


def test_no_layer_writes_global_kv_behind_the_boundary():
    expect_refusal("kv_source_layer_ids names layer 6 .. first layer 4", compress_ratios=(0, 0, 2, 2, 1, 1, 2, 2),
                   kv_source_layer_ids=(2, 4, 6))  # fmt: skip


@pytest.mark.parametrize("name", ["kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"])
@pytest.mark.parametrize(("ids", "rule"), [
    ((2, 8), "names layer 8 .. layers are 0..7"),
    ((-1, 2), "names layer -1 .. layers are 0..7"),
    ((4, 2), "=[4, 2] .. ascend without repeats"),
    ((2, 2), "=[2, 2] .. ascend without repeats"),
])  # fmt: skip
def test_a_list_of_layers_names_existing_ones_in_order(name, ids, rule):
    expect_refusal(f"{name} .. {rule}" if rule.startswith("names") else name + rule, **{name: ids})


# --- Widths and sizes.


def test_o_groups_divides_the_heads():
    expect_refusal("o_groups=3 .. num_attention_heads=2", o_groups=3)


def test_the_rotary_width_is_even():
    expect_refusal("qk_rope_head_dim=15 is odd", qk_rope_head_dim=15)


def test_the_rotary_width_fits_into_both_kinds_of_head():
    expect_refusal("qk_rope_head_dim=34 exceeds head_dim=32", qk_rope_head_dim=34, index_head_dim=64)
    expect_refusal("qk_rope_head_dim=34 exceeds index_head_dim=32", qk_rope_head_dim=34, head_dim=64)
    assert NANO.replace(qk_rope_head_dim=32).qk_rope_head_dim == 32


@pytest.mark.parametrize("name", ["head_dim", "index_head_dim", "engram_head_dim"])
def test_quantisation_blocks_divide_their_rows(name):
    expect_refusal(f"{name}=48 .. block 32", **{name: 48})  # 16 divides 48: only the block of 32 can refuse it
    off = {"quantize_engram": False} if name == "engram_head_dim" else {"quantize_cache": False}
    assert getattr(NANO.replace(**{name: 48}, **off), name) == 48


def test_no_token_visits_more_experts_than_there_are():
    expect_refusal("num_experts_per_tok=5 .. n_routed_experts=4", num_experts_per_tok=5)
    expect_refusal("dspark_num_experts_per_tok=5 .. dspark_n_routed_experts=4", dspark_num_experts_per_tok=5)
    assert NANO.replace(num_experts_per_tok=4).num_experts_per_tok == 4


@pytest.mark.parametrize(("name", "value"), [("num_key_value_heads", 2), ("n_shared_experts", 0),
                                             ("scoring_func", "softmax"), ("norm_topk_prob", False)])  # fmt: skip
def test_what_this_architecture_fixes_cannot_be_changed(name, value):
    expect_refusal(f"{name}={value!r} .. this architecture has", **{name: value})


def test_an_unknown_way_of_hyper_connections_names_the_known():
    expect_refusal("mhc_mode='multipass' .. single_pass, multi_pass, residual", mhc_mode="multipass")


# --- Engram and DSpark.


def test_engram_lists_have_equal_length():
    expect_refusal("engram_num_embeddings has 1 entries, engram_layer_ids has 2", engram_num_embeddings=(156,))


@pytest.mark.parametrize("name", ["engram_pad_token_id", "dspark_noise_token_id"])
@pytest.mark.parametrize("token", [-1, 64])
def test_token_ids_are_in_range(name, token):
    expect_refusal(f"{name}={token} .. ids are 0..63", **{name: token})
    assert getattr(NANO.replace(**{name: 63}), name) == 63


@pytest.mark.parametrize("name", ["engram_vocab_size", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim",
                                  "engram_compressed_vocab_size", "engram_pad_token_id"])  # fmt: skip
def test_engram_fields_are_needed_exactly_where_engram_is_used(name):
    expect_refusal(f"engram_layer_ids=[1, 3] needs {name}", **{name: None})
    assert NANO.replace(engram_layer_ids=(), **{name: None}).engram_layer_ids == ()


@pytest.mark.parametrize("name", ["dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts",
                                  "dspark_num_experts_per_tok", "dspark_noise_token_id",
                                  "dspark_target_layer_ids"])  # fmt: skip
def test_dspark_fields_are_needed_exactly_where_blocks_are_predicted(name):
    absent = () if name == "dspark_target_layer_ids" else None
    expect_refusal(f"num_nextn_predict_layers=3 needs {name}", **{name: absent})
    assert NANO.replace(num_nextn_predict_layers=0, **{name: absent}).num_nextn_predict_layers == 0


def test_engram_and_dspark_sizes_make_sense():
    expect_refusal("engram_compressed_vocab_size=65 .. vocab_size=64", engram_compressed_vocab_size=65)
    expect_refusal("engram_max_ngram_size=1 .. 2 tokens", engram_max_ngram_size=1)
    expect_refusal("engram_num_embeddings=[156, 0]", engram_num_embeddings=(156, 0))
    expect_refusal("engram_n_heads=0", engram_n_heads=0)
    expect_refusal("dspark_block_size=0", dspark_block_size=0)
    expect_refusal("num_nextn_predict_layers=-1", num_nextn_predict_layers=-1)
    for layer in (-1, 8):
        expect_refusal(f"dspark_target_layer_ids names layer {layer} .. 0..7", dspark_target_layer_ids=(5, layer))


# --- Temperatures of the drafter's confidences: ours, one per draft position, or none at all.


def test_temperatures_are_one_per_draft_position_or_none():
    assert NANO.dspark_block_size == 5 and NANO.dspark_temperatures == ()
    assert NANO.replace(dspark_temperatures=[0.5, 1, 1.5, 2, 7]).dspark_temperatures == (0.5, 1, 1.5, 2, 7)
    for few in ([1.0], [1.0] * 6):
        expect_refusal(f"dspark_temperatures has {len(few)} entries .. dspark_block_size=5 .. none at all",
                       dspark_temperatures=few)  # fmt: skip
    assert NANO.replace(num_nextn_predict_layers=0, dspark_temperatures=[2.0]).dspark_temperatures == (2.0,)


@pytest.mark.parametrize("bad", [0, -1.5, 2**31])
def test_a_temperature_is_positive(bad):
    expect_refusal(f"dspark_temperatures=[1.0, 1.0, 1.0, 1.0, {bad}] .. positive .. at most {2**31 - 1}",
                   dspark_temperatures=[1.0, 1.0, 1.0, 1.0, bad])  # fmt: skip


@pytest.mark.parametrize("bad", [None, 3, "23", [2, "3"], [math.nan], [math.inf], [None], [True], [[1.0]]])
def test_a_list_of_finite_numbers_is_needed_where_one_is_declared(bad):
    assert fields_declared("tuple[float, ...]") == ["dspark_temperatures"]
    expect_refusal(f"dspark_temperatures={bad!r} .. a list of finite numbers", dspark_temperatures=bad)


def test_temperatures_survive_writing_and_reading(tmp_path):
    config = NANO.replace(dspark_temperatures=[0.5, 1.0, 1.5, 2.0, 2.5])
    config.to_json(tmp_path / "config.json")
    assert Config.from_json(tmp_path / "config.json") == config


# --- YaRN.


@pytest.mark.parametrize(("change", "message"), [
    ({"rope_type": "linear"}, "rope_type='linear' .. yarn"),
    ({"factor": None}, "factor=None"),
    ({"factor": "16"}, "factor='16'"),
    ({"factor": 0}, "factor=0"),
    ({"beta_fast": math.inf}, "beta_fast=inf"),
    ({"beta_fast": 1, "beta_slow": 2}, "beta_fast=1 .. beta_slow=2"),
])  # fmt: skip
def test_a_yarn_setting_that_gives_no_frequencies_is_refused(change, message):
    expect_refusal(f"rope_scaling .. {message}", rope_scaling={**NANO.rope_scaling, **change})


@pytest.mark.parametrize("name", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_a_yarn_setting_that_lacks_a_number_is_refused(name):
    expect_refusal(f"rope_scaling lacks {name}", rope_scaling={k: v for k, v in NANO.rope_scaling.items() if k != name})


def test_a_rope_base_of_one_is_refused():
    expect_refusal("rope_theta=1 .. above 1", rope_theta=1)
    expect_refusal("compress_rope_theta=0.5 .. above 1", compress_rope_theta=0.5)


# --- Kinds of values: nothing but a ValueError, whatever the file holds.


@pytest.mark.parametrize("bad", [3.0, "3", True, [3], {}])
def test_a_whole_number_is_needed_where_one_is_declared(bad):
    for name in fields_declared("int"):
        expect_refusal(f"{name}={bad!r} .. a whole number is needed", **{name: bad})


def test_a_size_cannot_be_none():
    for name in [f.name for f in dataclasses.fields(Config) if str(f.type) == "int"]:
        expect_refusal(f"{name}=None .. a whole number is needed", **{name: None})


@pytest.mark.parametrize("bad", [0, -1])
def test_a_size_is_positive(bad):
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                 "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads",
                 "index_head_dim", "index_topk", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
                 "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings", "gate_temp", "swiglu_limit",
                 "routed_scaling_factor"):  # fmt: skip
        expect_refusal(f"{name}={bad}", **{name: bad})


@pytest.mark.parametrize("bad", [None, "1.5", math.nan, math.inf, True])
def test_a_finite_number_is_needed_where_one_is_declared(bad):
    for name in fields_declared("float"):
        expect_refusal(f"{name}={bad!r} .. a finite number is needed", **{name: bad})


@pytest.mark.parametrize("bad", [None, 3, "23", [2, "3"], [2, 3.0], [None], [True]])
def test_a_list_of_whole_numbers_is_needed_where_one_is_declared(bad):
    for name in fields_declared("tuple[int, ...]"):
        expect_refusal(f"{name}={bad!r} .. a list of whole numbers", **{name: bad})


def test_a_switch_is_true_or_false():
    for name in fields_declared("bool"):
        expect_refusal(f"{name}=1 .. true or false", **{name: 1})


def test_any_json_value_in_any_field_loads_or_is_a_value_error():
    """The kind of fault, not a list of known ones: no TypeError, IndexError or ZeroDivisionError from a file."""
    values = [None, 0, -1, 1, 7, 10**30, 1.5, math.nan, "", "x", [], [0], [-1], [3, 1], [10**30], [None], {}, True]
    content = NANO.to_dict()
    loaded = 0
    for name in content["text_config"]:
        for value in values:
            text = {**content["text_config"], name: value}
            try:
                loaded += len(Config.from_dict({"text_config": text}).plan()) > 0
            except ValueError as error:
                assert name in str(error) or name == "num_hidden_layers", (name, value, str(error))
    assert loaded > 50  # null stands for a default, 1 and 7 fit many sizes: not everything may be refused


# --- Reading and writing.

OURS = {"quantize_cache": True, "quantize_engram": True, "mhc_mode": "single_pass", "initializer_range": 0.02,
        "dspark_temperatures": []}  # fmt: skip


def released_file() -> dict:
    """The shape of a released config.json: text fields nested, vision beside them, fields unknown to us in both."""
    text = {name: value for name, value in Config.preset("flash").to_dict()["text_config"].items()
            if name not in OURS}
    return {
        "architectures": ["DeepseekV41ForConditionalGeneration"],
        "vision_config": {"depth": 27, "patch_size": 14, "nested": {"list": [1, None, "a"]}},
        "text_config": {**text, "attention_bias": False, "attention_dropout": None, "bos_token_id": 0},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "torch_dtype": "bfloat16",
    }


def test_a_released_file_comes_back_with_vision_and_unknown_fields_in_place(tmp_path):
    content = released_file()
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = Config.from_json(tmp_path / "config.json")
    assert config.hidden_size == 5120
    config.to_json(tmp_path / "again.json")
    written = json.loads((tmp_path / "again.json").read_text())
    assert written == {**content, "text_config": {**content["text_config"], **OURS}}
    assert Config.from_json(tmp_path / "again.json") == config


def test_unknown_fields_survive_a_change_of_another():
    config = Config.from_dict(released_file()).replace(index_topk=256)
    written = config.to_dict()
    assert written["vision_config"] == released_file()["vision_config"]
    assert written["text_config"]["attention_bias"] is False
    assert written["text_config"]["index_topk"] == 256


def test_a_flat_file_stays_flat():
    flat = {**NANO.to_dict()["text_config"], "attention_bias": False}
    assert Config.from_dict(flat).to_dict() == flat
    assert dataclasses.replace(Config.from_dict(flat), extra={}) == dataclasses.replace(NANO, extra={})


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_survives_writing_and_reading(name, tmp_path):
    config = Config.preset(name, quantize_cache=False, mhc_mode="multi_pass")
    config.to_json(tmp_path / "config.json")
    assert Config.from_json(tmp_path / "config.json") == config


@pytest.mark.parametrize("null", [False, True])
def test_absent_fields_and_nulls_take_their_defaults(null):
    text = NANO.to_dict()["text_config"]
    gone = [name for name in text if name.startswith(("candidate_", "engram_", "dspark_", "num_nextn", "rope_scaling"))]
    gone += ["gate_temp", "quantize_cache"]
    kept = {name: value for name, value in text.items() if name not in gone}
    config = Config.from_dict({**kept, **dict.fromkeys(gone)} if null else kept)
    assert (config.gate_temp, config.quantize_cache, config.rope_scaling) == (1.0, True, None)
    assert config.candidate_source_layer_id is None
    assert not any(layer.pooled or layer.forms_pool for layer in config.plan())
    assert (config.engram_layer_ids, config.engram_n_heads) == ((), None)
    assert (config.num_nextn_predict_layers, config.dspark_block_size) == (0, None)


def test_a_file_of_another_architecture_names_what_is_missing(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    with pytest.raises(ValueError, match=r"config\.json: not a config of this architecture: missing hidden_size"):
        Config.from_json(path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_file_that_is_no_json_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is not a JSON file in UTF-8"):
        Config.from_json(path)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"'])
def test_a_json_file_that_holds_no_object_is_named(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: a config is a JSON object, got"):
        Config.from_json(path)


def test_an_unknown_field_names_the_known_ones():
    expect_refusal("unknown config field 'hidden_dim' .. hidden_size", hidden_dim=64)


# --- Presets.


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown preset 'large': the presets are nano, toy, small, flash"):
        Config.preset("large")


def test_small_is_the_agreed_benchmark_model():
    golden = json.loads((GOLDEN / "small_config.json").read_text())
    written = Config.preset("small").to_dict()
    assert written["comment"] == golden["comment"]
    assert {name: written["text_config"][name] for name in golden["text_config"]} == golden["text_config"]


def test_flash_has_the_released_sizes():
    flash = Config.preset("flash")
    assert (flash.vocab_size, flash.hidden_size, flash.num_hidden_layers) == (129280, 5120, 40)
    assert (flash.num_attention_heads, flash.head_dim, flash.qk_rope_head_dim, flash.q_lora_rank) == (64, 512, 64, 1280)
    assert (flash.o_groups, flash.o_lora_rank, flash.sliding_window) == (8, 1024, 128)
    assert (flash.candidate_topk_blocks, flash.candidate_block_size) == (2048, 8)
    assert (flash.index_n_heads, flash.index_head_dim, flash.index_topk) == (32, 128, 512)
    assert (flash.moe_intermediate_size, flash.n_routed_experts, flash.num_experts_per_tok) == (2304, 384, 6)
    assert (flash.routed_scaling_factor, flash.gate_temp, flash.swiglu_limit) == (1.5, 1.0, 10)
    assert (flash.hc_mult, flash.hc_sinkhorn_iters, flash.hc_eps, flash.rms_norm_eps) == (4, 20, 1e-6, 1e-20)
    assert (flash.rope_theta, flash.compress_rope_theta, flash.max_position_embeddings) == (1e4, 1.6e5, 1048576)
    assert flash.rope_scaling == {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                                  "original_max_position_embeddings": 65536}  # fmt: skip
    assert (flash.engram_vocab_size, flash.engram_max_ngram_size) == (16_000_000, 4)
    assert (flash.engram_n_heads, flash.engram_head_dim, flash.engram_compressed_vocab_size) == (8, 256, 99092)
    assert (flash.num_nextn_predict_layers, flash.dspark_block_size, flash.dspark_markov_rank) == (3, 5, 256)
    assert (flash.dspark_target_layer_ids, flash.dspark_noise_token_id) == ((37, 38, 39), 128799)
    assert (flash.dspark_n_routed_experts, flash.dspark_num_experts_per_tok) == (128, 3)


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def rows_per_table(config: Config) -> tuple[int, ...]:
    """Spec 9.2 word for word: per layer, order and head the next prime of the order's walk that nobody has."""
    used: set[int] = set()
    rows = []
    for _ in config.engram_layer_ids:
        total = 0
        for _ in range(config.engram_max_ngram_size - 1):
            prime = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                prime += 1
                while prime in used or not is_prime(prime):
                    prime += 1
                used.add(prime)
                total += prime
        rows.append(total)
    return tuple(rows)


@pytest.mark.parametrize("name", preset_names())
def test_engram_tables_have_as_many_rows_as_their_primes_say(name):
    config = Config.preset(name)
    assert config.engram_num_embeddings == rows_per_table(config)


def test_the_released_tables_have_the_published_rows():
    assert Config.preset("flash").engram_num_embeddings == (384_006_168, 384_016_682)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("index_topk", 10**20, f"index_topk={10**20} is beyond what a tensor can have"),
    ("max_position_embeddings", 2**31, f"max_position_embeddings={2**31} is beyond"),
    ("initializer_range", 1e39, r"initializer_range=1e\+39 is beyond"),
    ("initializer_range", 1.5, r"initializer_range=1\.5: a standard deviation of at most 1"),
    ("initializer_range", 0, "initializer_range=0: a positive number"),
])  # fmt: skip
def test_sizes_beyond_reason_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        NANO.replace(**{field: value})
