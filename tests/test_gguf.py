"""The GGUF header reader: real files, every way to be malformed, and damage at random."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import GgufError
from kvtier.model.gguf import read_header, read_model
from kvtier.model.ggufbytes import MAX_KEPT_ITEMS
from kvtier.model.header import TENSOR_TYPES, ArrayInfo

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def item(type_id: int, value: Any) -> bytes:
    return text(value.encode()) if type_id == STRING else struct.pack("<" + CODES[type_id], value)


def key(name: str, type_id: int, value: Any) -> bytes:
    return text(name.encode()) + struct.pack("<I", type_id) + item(type_id, value)


def array(name: str, type_id: int, values: Any) -> bytes:
    return (
        text(name.encode())
        + struct.pack("<IIQ", ARRAY, type_id, len(values))
        + b"".join(item(type_id, v) for v in values)
    )


def tensor(name: str, shape: tuple[int, ...], type_id: int, off: int) -> bytes:
    return text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, off)


def gguf(keys: list[bytes], tensors: list[bytes] | None = None, data: int = 0, version: int = 3) -> bytes:
    """A GGUF file with `data` bytes of tensor data."""
    tensors = tensors or []
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data) if tensors else head


KEYS = [
    key("general.architecture", STRING, "llama"),
    key("llama.block_count", U32, 2),
    key("a.flag", BOOL, 1),
    key("a.half", F32, 0.5),
    key("a.big", U64, 1 << 60),
    key("a.minus", I32, -7),
    array("a.numbers", I32, [3, -1, 4]),
    array("a.words", STRING, ["x", "", "äö"]),
]
LARGE = [
    array("tokens", STRING, [f"token{i}" for i in range(MAX_KEPT_ITEMS + 1)]),
    array("scores", F32, [0.0] * (MAX_KEPT_ITEMS + 1)),
]
TENSORS = [tensor("token_embd.weight", (64, 3), 0, 0), tensor("blk.0.w", (64, 5), 2, 768)]
SMALL = gguf(KEYS, TENSORS, data=768 + 180)  # what is fuzzed: every byte of it matters
WHOLE = gguf(KEYS + LARGE, TENSORS, data=768 + 180)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write_file


def test_reads_every_kind_of_value(write: Any) -> None:
    header = read_header(write(WHOLE))
    assert header.version == 3
    assert header.architecture == "llama"
    assert header.get_int("llama.block_count") == 2
    assert header.metadata["a.flag"] is True
    assert header.get_float("a.half") == 0.5
    assert header.get_int("a.big") == 1 << 60
    assert header.get_int("a.minus") == -7
    assert header.get_ints("a.numbers") == (3, -1, 4)
    assert header.metadata["a.words"] == ("x", "", "äö")
    assert header.metadata["tokens"] == ArrayInfo("string", MAX_KEPT_ITEMS + 1)
    assert header.metadata["scores"] == ArrayInfo("float32", MAX_KEPT_ITEMS + 1)
    first, second = header.tensors
    assert (first.name, first.shape, first.n_bytes, first.off_bytes) == ("token_embd.weight", (64, 3), 768, 0)
    assert (second.type.name, second.n_items, second.n_bytes) == ("q4_0", 320, 180)
    assert header.tensor_bytes == 948
    assert header.data_off_bytes % 32 == 0
    assert header.data_off_bytes + 768 + 180 == header.file_bytes


def test_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    smollm2, gemma3 = read_header(smollm2_path), read_header(gemma3_path)
    assert (smollm2.architecture, len(smollm2.tensors), smollm2.get_int("llama.block_count")) == ("llama", 272, 30)
    assert smollm2.metadata["tokenizer.ggml.tokens"] == ArrayInfo("string", 49_152)
    assert (gemma3.architecture, len(gemma3.tensors), gemma3.get_int("gemma3.attention.sliding_window")) == (
        "gemma3",
        236,
        512,
    )
    for header in (smollm2, gemma3):
        last = header.tensors[-1]
        assert header.data_off_bytes + last.off_bytes + last.n_bytes <= header.file_bytes


def test_large_arrays_are_not_loaded(gemma3_path: Path) -> None:
    tracemalloc.start()
    try:
        read_header(gemma3_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, (
            "a vocabulary of 262,144 strings must not become Python objects"
        )
    finally:
        tracemalloc.stop()


def test_tensor_types_are_ggmls_own() -> None:
    import ctypes

    from llama_cpp.llama_cpp import _lib as libggml

    libggml.ggml_type_size.restype = ctypes.c_size_t
    libggml.ggml_blck_size.restype = ctypes.c_int64
    libggml.ggml_type_name.restype = ctypes.c_char_p
    for type_id, known in TENSOR_TYPES.items():
        assert libggml.ggml_type_name(type_id).decode() == known.name
        assert (libggml.ggml_blck_size(type_id), libggml.ggml_type_size(type_id)) == (
            known.block_items,
            known.block_bytes,
        )


ARCH = key("general.architecture", STRING, "llama")
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "not a GGUF file"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive"),
    "web page": (b"<!DOCTYPE html>", "web page"),
    "lfs pointer": (b"version https", "Git LFS pointer"),
    "old format": (b"tjgg" + bytes(60), "before GGUF"),
    "magic only": (b"GGUF", "ends inside the version"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    "version 1": (struct.pack("<4sIII", b"GGUF", 1, 0, 0), "version 1"),
    "version 9": (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
    "counts missing": (struct.pack("<4sI", b"GGUF", 3), "number of tensors"),
    "absurd tensors": (
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 62, 0) + bytes(99),
        "claims 4,611,686,018,427,387,904 tensors",
    ),
    "absurd keys": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 40) + bytes(99), "claims 1,099,511,627,776 keys"),
    "empty key": (gguf([key("", U32, 1) + bytes(8)]), "impossible length (0 bytes)"),
    "long key": (gguf([struct.pack("<Q", 1 << 40) + bytes(20)]), "impossible length"),
    "key not text": (gguf([text(b"\xff\xfe") + struct.pack("<II", U32, 1)]), "not UTF-8"),
    "key twice": (gguf([ARCH, ARCH]), "occurs twice"),
    "unknown value type": (gguf([text(b"a") + struct.pack("<II", 77, 1)]), "unknown value type 77"),
    "cut value": (gguf([ARCH, key("a.long", U64, 1)])[:-3], "ends inside the value of 'a.long'"),
    "cut text": (gguf([ARCH])[:-2], "ends inside the text"),
    "long text": (gguf([text(b"a") + struct.pack("<IQ", STRING, 1 << 50)]), "impossible length"),
    "nested array": (gguf([text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(20)]), "nested arrays"),
    "unknown items": (gguf([text(b"a") + struct.pack("<IIQ", ARRAY, 99, 1) + bytes(20)]), "unknown item type 99"),
    "absurd array": (gguf([text(b"a") + struct.pack("<IIQ", ARRAY, F64, 1 << 61)]), "do not fit"),
    "cut array": (gguf([array("a", STRING, ["x", "yy"])])[:-1], "ends inside the array"),
    "bad alignment": (gguf([key("general.alignment", U32, 33)]), "not a power of two"),
    "alignment is text": (gguf([key("general.alignment", STRING, "32")]), "not a power of two"),
    "tensor twice": (
        gguf([ARCH], [tensor("t", (32,), 0, 0), tensor("t", (32,), 0, 128)], 256),
        "tensor 't' occurs twice",
    ),
    "no dimensions": (gguf([ARCH], [tensor("t", (), 0, 0)], 64), "0 dimensions"),
    "too many dimensions": (gguf([ARCH], [tensor("t", (1, 1, 1, 1, 1), 0, 0)], 64), "5 dimensions"),
    "zero size": (gguf([ARCH], [tensor("t", (32, 0), 0, 0)], 64), "impossible shape"),
    "overflowing size": (gguf([ARCH], [tensor("t", (1 << 40, 1 << 40), 0, 0)], 64), "impossible shape"),
    "unknown tensor type": (gguf([ARCH], [tensor("t", (32,), 99, 0)], 64), "unknown type 99"),
    "removed tensor type": (gguf([ARCH], [tensor("t", (32,), 4, 0)], 64), "unknown type 4"),
    "rows not whole blocks": (gguf([ARCH], [tensor("t", (33,), 2, 0)], 64), "not a multiple of q4_0's block of 32"),
    "tensor elsewhere": (gguf([ARCH], [tensor("t", (32,), 0, 64)], 256), "the tensors before it end at 0"),
    "cut data": (gguf([ARCH], [tensor("t", (32,), 0, 0)], 127), "ends inside tensor 't'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_named_with_offset_reason_and_way_out(name: str, write: Any) -> None:
    data, reason = MALFORMED[name]
    path = write(data)
    with pytest.raises(GgufError) as caught:
        read_header(path)
    error = caught.value
    assert reason in str(error)
    assert str(path) in str(error) and f"at byte {error.off_bytes:,}" in str(error)
    assert 0 <= error.off_bytes <= len(data)
    assert error.hint and error.exit_code == 3


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="no such file"):
        read_header(tmp_path / "missing.gguf")
    (tmp_path / "other.gguf").write_bytes(SMALL)
    with pytest.raises(GgufError, match=r"(?s)a directory.*other\.gguf"):
        read_header(tmp_path)
    with pytest.raises(GgufError, match="cannot be read"):
        read_header("nul\0byte")


def test_wrong_types_are_named(write: Any) -> None:
    header = read_header(write(WHOLE))
    with pytest.raises(GgufError, match="'a.half' should be an integer"):
        header.get_int("a.half")
    with pytest.raises(GgufError, match="'a.flag' should be an integer"):
        header.get_int("a.flag")
    with pytest.raises(GgufError, match="'tokens' should be a string, but is an array of 4097"):
        header.get_str("tokens")
    with pytest.raises(GgufError, match="'a.words' should be an array of integers"):
        header.get_ints("a.words")
    with pytest.raises(GgufError, match="'a.half' should be a boolean"):
        header.get_bool("a.half")
    with pytest.raises(GgufError, match="'a.words' should be a number"):
        header.get_float("a.words")
    with pytest.raises(GgufError, match="no key 'llama.context_length'"):
        header.require_int("llama.context_length")


def test_split_models(tmp_path: Path) -> None:
    def part(i: int, n: int = 2) -> Path:
        return tmp_path / f"m-{i:05d}-of-{n:05d}.gguf"

    keys = [ARCH, key("split.count", U16, 2)]
    part(1).write_bytes(gguf([*keys, key("split.no", U16, 0)], [tensor("a", (32,), 0, 0)], 128))
    with pytest.raises(GgufError, match="no such file"):
        read_model(part(1))
    part(2).write_bytes(gguf([key("split.no", U16, 1), key("split.count", U16, 2)], [tensor("b", (32,), 0, 0)], 128))
    assert [h.tensors[0].name for h in read_model(part(1))] == ["a", "b"]
    with pytest.raises(GgufError, match=r"(?s)is part 2 of 2.*m-00001-of-00002\.gguf"):
        read_model(part(2))
    (tmp_path / "renamed.gguf").write_bytes(part(1).read_bytes())
    with pytest.raises(GgufError, match="its name is not of the form"):
        read_model(tmp_path / "renamed.gguf")


def survives(path: Path, data: bytes) -> None:
    """Reading `data` gives a header or a GgufError, and takes little memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        header = read_header(path)
        assert header.file_bytes == len(data)
    except GgufError as err:
        assert err.reason and err.hint and 0 <= err.off_bytes <= len(data)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (4 << 20) + 20 * len(data)


fuzz = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@given(cut=st.integers(0, len(SMALL)))
@fuzz
def test_truncation_anywhere(tmp_path: Path, cut: int) -> None:
    survives(tmp_path / "cut.gguf", SMALL[:cut])
    if cut < len(SMALL):
        with pytest.raises(GgufError):
            read_header(tmp_path / "cut.gguf")


@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 255)), min_size=1, max_size=8),
    near_start=st.booleans(),
)
@fuzz
def test_bytes_flipped_anywhere(tmp_path: Path, flips: list[tuple[int, int]], near_start: bool) -> None:
    data = bytearray(SMALL)
    for at, mask in flips:
        data[at % (400 if near_start else len(data))] ^= mask
    survives(tmp_path / "flipped.gguf", bytes(data))


@given(
    at=st.integers(0, 500),
    number=st.sampled_from([0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]),
)
@fuzz
def test_extreme_numbers_anywhere(tmp_path: Path, at: int, number: int) -> None:
    survives(tmp_path / "extreme.gguf", SMALL[:at] + struct.pack("<Q", number) + SMALL[at + 8 :])


@given(body=st.binary(max_size=400), counts=st.tuples(st.integers(0, 8), st.integers(0, 8)))
@fuzz
def test_noise_after_a_sound_start(tmp_path: Path, body: bytes, counts: tuple[int, int]) -> None:
    survives(tmp_path / "noise.gguf", struct.pack("<4sIQQ", b"GGUF", 3, *counts) + body)


def test_many_strings_are_refused_before_they_are_walked(write: Any) -> None:
    n = 1 << 24
    path = write(gguf([text(b"a") + struct.pack("<IIQ", ARRAY, STRING, n)]))
    with path.open("r+b") as file:  # a sparse file: 8 bytes of length per string, all zero
        file.truncate(path.stat().st_size + 8 * n)
    with pytest.raises(GgufError, match="a header holds at most"):
        read_header(path)
