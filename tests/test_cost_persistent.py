"""The persistent cache: an eighth of V4-Flash's, a quarter by the format and a half by dropping windows."""

import pytest

from tinyds41.cost.generations import generation
from tinyds41.cost.persistent import ASSUMPTIONS, persistent_bytes, tokens_per_save_at_par

V4, V41 = "V4-Flash", "V4.1-Flash"


def test_v4s_windows_equal_its_global_bytes_at_a_save_per_915_tokens():
    assert round(tokens_per_save_at_par(V4)) == 915
    tokens = 915 * 128 * 2  # whole groups of 128; a turn saves twice
    saved = persistent_bytes(V4, tokens, turns=128)
    assert saved.window_saves == 256
    assert saved.window_bytes == 256 * 43 * 128 * 584
    assert saved.global_bytes == tokens * 3514.25
    assert abs(saved.window_bytes / saved.global_bytes - 1) < 0.001  # 914.65 tokens, rounded to 915


def test_v41_keeps_an_eighth_of_v4_at_that_rate():
    """The report's figure: a quarter from the format, a half from the windows."""
    tokens, turns = 915 * 128 * 2, 128
    before, now = persistent_bytes(V4, tokens, turns), persistent_bytes(V41, tokens, turns)
    assert round(before.total / now.total) == 8
    assert round(before.global_bytes / now.global_bytes) == 4
    assert now.window_saves == now.window_bytes == 0
    assert now.total == 890 * tokens


def test_turns_cost_v4_and_not_v41():
    assert persistent_bytes(V41, 4096, 1).total == persistent_bytes(V41, 4096, 100).total
    one, two = (persistent_bytes(V4, 4096, turns) for turns in (1, 2))
    assert two.total - one.total == 2 * generation(V4).kv_bytes().window_bytes
    assert one.global_bytes == two.global_bytes


def test_earlier_generations_have_no_windows_to_save():
    saved = persistent_bytes("V3", 1000, 10)
    assert (saved.window_saves, saved.window_bytes, saved.total) == (0, 0, 70_272 * 1000)
    with pytest.raises(ValueError, match="V3 saves no windows"):
        tokens_per_save_at_par("V3")


def test_a_short_conversation_saves_the_rows_it_has():
    assert persistent_bytes(V4, 10, 1).window_bytes == 2 * 43 * 10 * 584


def test_the_result_carries_its_assumptions():
    content = persistent_bytes(V4, 4096, 3).to_dict()
    assert content["assumptions"] == list(ASSUMPTIONS) and "twice a turn" in ASSUMPTIONS[1]
    assert content["total"] == content["global_bytes"] + content["window_bytes"]


@pytest.mark.parametrize(("tokens", "turns", "named"), [
    (0, 1, "context=0"), (2**20 + 1, 1, "context=1048577"), (10, 0, "turns=0"), (10, 11, "turns=11"),
    (10, 1.5, r"turns=1\.5"), (10, True, "turns=True"),
])  # fmt: skip
def test_tokens_and_turns_that_cannot_be_are_named(tokens, turns, named):
    with pytest.raises(ValueError, match=named):
        persistent_bytes(V41, tokens, turns)


def test_an_unknown_generation_names_the_known():
    with pytest.raises(ValueError, match=r"'V4'.*V4-Flash"):
        persistent_bytes("V4", 10, 1)
