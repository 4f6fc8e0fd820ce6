"""Tables of Engram rows in files: their bytes, their faults, and files longer than any disk here."""

from __future__ import annotations

import json
import mmap
import os
import re

import pytest
import torch
from host_tables import FLASH, LARGE, random_table, require_sparse_files
from models import NANO

from tinyds41 import few_codec
from tinyds41.formats import ENGRAM
from tinyds41.infer import host_layout, host_table
from tinyds41.infer.host_layout import HEADER_BYTES
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.host_writer import new_table

ROWS, WIDTH = NANO.engram_num_embeddings[0], NANO.engram_head_dim
ROW_BYTES = 33  # 32 codes of a byte and one scale


def uses(path):
    """How often this process has a file open or mapped."""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("the system does not tell which files are open")
    names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps:
        return names.count(str(path)) + sum(line.rstrip().endswith(str(path)) for line in maps)


def bits(x):
    return x.contiguous().view(torch.int32)


# ---- bytes ----


def test_a_file_is_a_header_page_and_then_the_packed_rows(tmp_path):
    table, weight = random_table(tmp_path / "t")
    content = (tmp_path / "t").read_bytes()
    assert len(content) == HEADER_BYTES + ROWS * ROW_BYTES == table.apparent_bytes
    assert content[HEADER_BYTES:] == ENGRAM.encode(weight).numpy().tobytes()
    assert table.row_bytes == ROW_BYTES and ENGRAM.row_bytes(FLASH.engram_head_dim) == 264


@pytest.mark.parametrize("index", [[[[5, 0], [155, 5]]], [[[1]]], [2, 2, 2, 1, 154], list(range(155, -1, -1))])
def test_rows_come_back_as_fake_quant_rounds_them(tmp_path, index):
    """To the last bit, the sign of zero too; repeated, unsorted, first and last rows."""
    table, weight = random_table(tmp_path / "t")
    index = torch.tensor(index)
    assert torch.equal(bits(table.take(index)), bits(ENGRAM.fake_quant(weight[index])))
    assert table.take(index).shape == (*index.shape, WIDTH)


def test_every_byte_decodes_as_in_the_format(tmp_path):
    """All codes under all scales, those that stand for no number included."""
    random_table(tmp_path / "t")
    codes = torch.randint(256, (ROWS, ROW_BYTES), dtype=torch.uint8)
    codes[:128, :32] = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(16, 1)
    codes[:128, 32] = torch.arange(0, 256, 2)
    content = (tmp_path / "t").read_bytes()[:HEADER_BYTES] + codes.numpy().tobytes()
    (tmp_path / "t").write_bytes(content)
    found, expected = HostTable(tmp_path / "t", NANO, 0).take(torch.arange(ROWS)), ENGRAM.decode(codes, WIDTH)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    assert torch.equal(bits(found)[~found.isnan()], bits(expected)[~found.isnan()])


def test_only_the_rows_asked_for_are_decoded(tmp_path, monkeypatch):
    table, _ = random_table(tmp_path / "t")
    decoded, from_codes = [], few_codec.from_codes

    def counted(codes, *rest):
        decoded.append(codes.shape)
        return from_codes(codes, *rest)

    monkeypatch.setattr(few_codec, "from_codes", counted)
    assert table.take(torch.empty(2, 0, 6, dtype=torch.long)).shape == (2, 0, 6, WIDTH) and not decoded
    table.take(torch.tensor([7, 7, 150]))
    assert decoded == [(3, 32)]


def test_rows_of_a_slow_file_are_announced_together(tmp_path, monkeypatch):
    """All pages in which a row begins or ends, the rows that showed the file to be slow left out."""
    table, weight = random_table(tmp_path / "t", NANO, 1)
    asked = set()
    monkeypatch.setattr(os, "posix_fadvise", lambda d, start, n, advice: asked.add((start, n)))
    index = torch.cat([torch.arange(host_table.PROBE), torch.arange(200, 250, 2)])
    monkeypatch.setattr(host_table, "SLOW", 1e9)
    table.take(index)
    assert not asked and not table.is_slow
    monkeypatch.setattr(host_table, "SLOW", 0)
    assert torch.equal(table.take(index), ENGRAM.fake_quant(weight[index]))
    # Rows 200 to 247 lie in the third page; row 248 begins in its last 8 bytes and ends in the fourth.
    size = mmap.PAGESIZE
    assert table.is_slow and asked == ({(8192, 4096), (12288, 4096)} if size == 4096 else {(0, size)})


@pytest.mark.parametrize(("index", "named"), [([3, -1], "-1..3"), ([0, 156], "0..156"), ([2**40], "1099511627776")])
def test_a_row_outside_the_table_is_refused(tmp_path, index, named):
    table, _ = random_table(tmp_path / "t")
    with pytest.raises(IndexError, match=rf"rows .*{re.escape(named)} are not in a table of 156"):
        table.take(torch.tensor(index))


# ---- E5: another table ----


@pytest.mark.parametrize(("changes", "named"), [
    ({"engram_vocab_size": 23, "engram_num_embeddings": [204, 358]},
     "rows 156, needed 204.*engram_vocab_size 16, needed 23"),
    ({"engram_head_dim": 64}, "width 32, needed 64"),
    ({"engram_layer_ids": [2, 3]}, "layer 1, needed 2"),
    ({"engram_compressed_vocab_size": 40}, "engram_compressed_vocab_size 64, needed 40"),
    ({"engram_pad_token_id": 3}, "engram_pad_token_id 2, needed 3"),
    ({"vocab_size": 65}, "vocab_size 64, needed 65"),
    ({"engram_n_heads": 3, "engram_max_ngram_size": 3}, "max_ngram_size 4, needed 3; engram_n_heads 2, needed 3"),
])  # fmt: skip
def test_the_table_of_another_config_is_refused(tmp_path, monkeypatch, changes, named):
    random_table(tmp_path / "t")
    config = NANO.replace(**changes)
    if "engram_n_heads" in changes:  # as many rows for as many columns, but in another order
        monkeypatch.setattr(host_layout, "checked_primes", lambda *_: [])
    with pytest.raises(ValueError, match=rf"t is another table: it has .*{named}"):
        HostTable(tmp_path / "t", config, 0)


def test_the_table_of_another_layer_is_refused(tmp_path):
    random_table(tmp_path / "t")
    with pytest.raises(ValueError, match=r"layer 1, needed 3; rows 156, needed 304"):
        HostTable(tmp_path / "t", NANO, 1)


def test_sizes_that_are_not_those_of_the_primes_are_refused(tmp_path):
    wrong = NANO.replace(engram_num_embeddings=[157, 304])
    with pytest.raises(ValueError, match=r"engram_num_embeddings\[0\]=157.* add up to 156"):
        HostTable.create(tmp_path / "t", torch.zeros(157, 32), wrong, 0)
    with pytest.raises(ValueError, match=r"a table of shape \(157, 32\), the config's is \(156, 32\)"):
        HostTable.create(tmp_path / "t", torch.zeros(157, 32), NANO, 0)
    assert not list(tmp_path.iterdir())


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host_layout, "VERSION", 2)
    random_table(tmp_path / "t")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 2, needed 1"):
        HostTable(tmp_path / "t", NANO, 0)


# ---- damaged files ----


def test_a_flipped_bit_anywhere_in_the_header_is_refused(tmp_path):
    random_table(tmp_path / "t")
    sound = bytearray((tmp_path / "t").read_bytes())
    end = len(sound[:HEADER_BYTES].rstrip(b"\0"))
    for place in [*range(end), end + 1, HEADER_BYTES - 1]:
        sound[place] ^= 1 << place % 8
        (tmp_path / "t").write_bytes(sound)
        with pytest.raises(ValueError, match=r"t(: its header is damaged| is no table)"):
            HostTable(tmp_path / "t", NANO, 0)
        sound[place] ^= 1 << place % 8


@pytest.mark.parametrize("size", [0, 10, 4095, 4096, 4096 + ROWS * 33 - 1, 4096 + ROWS * 33 + 1])
def test_a_file_of_another_length_is_refused(tmp_path, size):
    random_table(tmp_path / "t")
    os.truncate(tmp_path / "t", size)
    message = f"{size:,} bytes, 156 rows of 33 need 9,244" if size >= HEADER_BYTES else "damaged|no table"
    with pytest.raises(ValueError, match=message):
        HostTable(tmp_path / "t", NANO, 0)


def test_a_file_cut_while_it_is_open_is_refused(tmp_path):
    """The rest of the file's last page would read as zeros, and a page behind it would kill the process."""
    table, _ = random_table(tmp_path / "t")
    assert table.take(torch.tensor([100])).any()
    os.truncate(tmp_path / "t", 5000)
    for row in (100, 155):
        with pytest.raises(ValueError, match="has 5,000 bytes, 156 rows of 33 need 9,244"):
            table.take(torch.tensor([row]))


def test_a_missing_file_names_what_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no table at .*t: engram_to_host"):
        HostTable(tmp_path / "t", NANO, 0)


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder: a table is one file"):
        HostTable(tmp_path, NANO, 0)


@pytest.mark.parametrize("table", [-1, 2])
def test_a_table_that_the_config_has_not_is_refused(tmp_path, table):
    random_table(tmp_path / "t")
    with pytest.raises(ValueError, match=rf"table={table}: the config has 2, counted from 0"):
        HostTable(tmp_path / "t", NANO, table)


@pytest.mark.parametrize("index", [torch.tensor([1.5]), torch.tensor([True]), torch.tensor([1 + 2j])])
def test_rows_are_numbered_by_whole_numbers(tmp_path, index):
    table, _ = random_table(tmp_path / "t")
    with pytest.raises(TypeError, match=f"whole numbers, got {index.dtype}"):
        table.take(index)


def test_a_closed_table_is_not_read(tmp_path):
    table, _ = random_table(tmp_path / "t")
    table.close()
    with pytest.raises(ValueError, match="t is closed"):
        table.take(torch.tensor([0]))
    for size in ("apparent_bytes", "stored_bytes"):
        with pytest.raises(ValueError, match="t is closed"):
            getattr(table, size)
    with pytest.raises(ValueError, match="t is closed"):
        table.verify()
    table.close()


def test_a_closed_table_holds_nothing_of_its_file(tmp_path):
    """Neither the descriptor nor the mapping: a file that was deleted gives its room back."""
    table, _ = random_table(tmp_path / "t")
    before = uses(tmp_path / "t")
    table.close()
    assert before == 3 and uses(tmp_path / "t") == 0  # opened, mapped, and the mapping's own descriptor


def test_what_is_being_read_when_a_table_is_closed_is_read_to_its_end(tmp_path, monkeypatch):
    table, weight = random_table(tmp_path / "t")
    monkeypatch.setattr(table, "_probe", lambda rows, numbers: table.close())
    table.is_slow = True  # so that the descriptor is used once more
    index = torch.arange(host_table.PROBE + 1)
    assert torch.equal(table.take(index), ENGRAM.fake_quant(weight[index]))
    assert uses(tmp_path / "t") == 0


def flip_last_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0x11]))


def test_a_table_is_verified_by_the_file_that_is_open(tmp_path):
    table, _ = random_table(tmp_path / "t")
    later, _ = random_table(tmp_path / "t", seed=1)
    flip_last_byte(tmp_path / "t")
    with pytest.raises(ValueError, match="is damaged"):
        later.verify()
    table.verify()


def test_flipped_rows_show_when_the_table_is_verified(tmp_path):
    table, _ = random_table(tmp_path / "t")
    table.verify()
    flip_last_byte(tmp_path / "t")
    with pytest.raises(ValueError, match=r"damaged: its rows have digest \w{64}, written was \w{64}"):
        table.verify()


# ---- two of a name ----


def test_who_has_a_table_open_keeps_it_when_another_takes_its_name(tmp_path):
    first, weight = random_table(tmp_path / "t")
    second, other = random_table(tmp_path / "t", seed=1)
    row = torch.tensor([9])
    assert torch.equal(first.take(row), ENGRAM.fake_quant(weight[row]))
    assert torch.equal(second.take(row), ENGRAM.fake_quant(other[row]))


# ---- the released size ----


def test_tables_of_the_released_size_are_made_and_read(tmp_path):
    """768,022,850 rows of 264 bytes, 203 GB to look at, of which a few take room."""
    require_sparse_files(tmp_path, 102 * 10**9)
    apparent = stored = 0
    for number in (0, 1):
        rows = torch.tensor([0, 1, 17_000_000, LARGE.engram_num_embeddings[number] - 1])  # one behind 2^32 bytes
        values = torch.randn(4, 256)
        with new_table(tmp_path / str(number), LARGE, number) as writer:
            writer.scatter(rows, values)
        table = HostTable(tmp_path / str(number), LARGE, number)
        found = table.take(torch.cat([rows, torch.tensor([2, 17_000_001, table.n_rows - 2])]))
        assert torch.equal(found, torch.cat([ENGRAM.fake_quant(values), torch.zeros(3, 256)]))
        apparent, stored = apparent + table.apparent_bytes - HEADER_BYTES, stored + table.stored_bytes
    assert apparent == 768_022_850 * 264 == 202_758_032_400
    assert 0 < stored < 10**6


def test_a_header_is_readable_and_says_what_the_table_is_for(tmp_path):
    random_table(tmp_path / "t")
    header = json.loads((tmp_path / "t").read_bytes().split(b"\n")[1])
    assert header["version"] == 1 and (header["layer"], header["rows"], header["width"]) == (1, 156, 32)
    assert header["engram_vocab_size"] == NANO.engram_vocab_size and len(header["sha256"]) == 64
