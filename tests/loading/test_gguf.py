"""The GGUF header parser: equal to the reference reader on a real file, and unmoved by hostile ones."""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from octavo.errors import LoadError
from octavo.loading.gguf import read_gguf
from octavo.loading.resolve import resolve_model
from tests.support.gguf_bytes import ARRAY, BOOL, F32, STRING, U8, U32, U64, array, f32, gguf_bytes, key, string, tensor, text, u32
from tests.support.tiny_files import TOKENS, gguf_file

HUGE = 2**63
ONE = [u32("a.b", 1)]


@pytest.mark.parametrize("default", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["small", "default model"])
@pytest.mark.timed("the CPU time of reading a header")
def test_a_header_equals_that_of_the_reference_reader(default: bool, tmp_path: Path) -> None:
    """For the names of 49,152 tokens the reference takes six seconds."""
    import gguf

    path = resolve_model(None).path if default else tmp_path / "tiny.gguf"
    if not default:
        path.write_bytes(gguf_file())
    start = time.process_time()
    ours = read_gguf(path)
    seconds = time.process_time() - start
    theirs = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    tensors = {t.name: (t.shape, t.kind, t.offset, t.num_bytes) for t in ours.tensors.values()}
    assert tensors == {
        t.name: (tuple(int(d) for d in reversed(t.shape)), t.tensor_type.name, t.data_offset, t.n_bytes) for t in theirs.tensors
    }
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == (49152 if default else len(TOKENS))
    assert seconds < 0.25  # 0.06 measured


def test_kind_table_equals_the_reference() -> None:
    import gguf

    from octavo.loading.gguf import KINDS

    assert {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()} == KINDS


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(tmp_path: Path, version: int) -> None:
    layouts = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    lowest = {1: -128, 3: -(2**15), 5: -(2**31), 6: 0.5, 10: 2**64 - 1, 11: -(2**63), 12: -1e300}
    keys, expected = [], {}
    for kind, layout in layouts.items():
        value = lowest.get(kind, 200)
        keys.append(key(f"one.{kind}", kind, struct.pack("<" + layout, value)))
        keys.append(array(f"many.{kind}", kind, 2, struct.pack("<2" + layout, value, 1)))
        expected |= {f"one.{kind}": value, f"many.{kind}": [value, 1]}
    keys += [key("bool", BOOL, b"\1"), string("text", "né\n"), array("texts", STRING, 2, text("") + text("▁a"))]
    keys += [array("nested", ARRAY, 2, struct.pack("<IQ", U8, 0) + struct.pack("<IQ2B", U8, 2, 7, 8))]
    path = tmp_path / "all.gguf"
    path.write_bytes(gguf_bytes(keys, [tensor("w", [3, 2], offset=32)], bytes(64), version=version))
    read = read_gguf(path)
    assert read.metadata == expected | {"bool": True, "text": "né\n", "texts": ["", "▁a"], "nested": [[], [7, 8]]}
    assert read.tensors["w"].shape == (2, 3) and read.tensors["w"].offset % 32 == 0
    assert read.tensors["w"].offset + 32 == path.stat().st_size


nested = struct.pack("<IQ", ARRAY, 1) * 50000
HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "magic alone": (b"GGUF", "not a GGUF file"),
    "wrong magic": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    **{f"version {v}": (gguf_bytes(version=v), f"version {v}") for v in (0, 1, 4, 2**32 - 1, 3 << 24)},
    "2^63 keys": (gguf_bytes(ONE, num_keys=HUGE), "9223372036854775808 keys"),
    "2^63 tensors": (gguf_bytes(ONE, num_tensors=HUGE), "9223372036854775808 tensors"),
    "more keys than there are": (gguf_bytes([*ONE, bytes(400)], num_keys=20), "key"),
    "string longer than the file": (gguf_bytes([key("a", STRING, text("x", length=HUGE))]), "longer than the file"),
    "key longer than the file": (gguf_bytes([text("k", length=2**64 - 1)], data=bytes(32)), "longer than the file"),
    "key of length 0": (gguf_bytes([u32("", 1)]), "name of a key has 0"),
    "key of 70,000 letters": (gguf_bytes([u32("k" * 70000, 1)]), "name of a key has 70000"),
    "key that is not UTF-8": (gguf_bytes([key(b"\xff\xfe", U32, bytes(4))]), "not UTF-8"),
    "string that is not UTF-8": (gguf_bytes([string("a", b"\xff")]), "'a': a string is not UTF-8"),
    "unknown value type": (gguf_bytes([key("a", 13, bytes(8))]), "unknown value type 13"),
    "unknown element type": (gguf_bytes([array("a", 99, 1, bytes(8))]), "unknown value type 99"),
    "key twice": (gguf_bytes([u32("a", 1), u32("a", 2)]), "'a' occurs twice"),
    "array of 2^63 strings": (gguf_bytes([array("a", STRING, HUGE)]), "9223372036854775808 elements"),
    "array of 2^61 u64": (gguf_bytes([array("a", U64, 2**61)]), "elements"),
    "array longer than the file": (gguf_bytes([array("a", F32, 10**6, bytes(16))]), "needs 4000000 bytes"),
    "strings longer than the file": (gguf_bytes([array("a", STRING, 10**6, bytes(16))]), "needs 8000000 bytes"),
    "arrays 50,000 deep": (gguf_bytes([key("a", ARRAY, nested)]), "nest deeper"),
    **{f"alignment {a}": (gguf_bytes([u32("general.alignment", a)]), "general.alignment") for a in (0, 1, 3, 48, 2**31)},
    "alignment 2^40": (gguf_bytes([key("general.alignment", U64, struct.pack("<Q", 2**40))]), "general.alignment"),
    "alignment a string": (gguf_bytes([string("general.alignment", "32")]), "general.alignment"),
    "alignment a float": (gguf_bytes([f32("general.alignment", 32.0)]), "general.alignment"),
    "0 dimensions": (gguf_bytes(tensors=[tensor("w", [])], data=bytes(64)), "0 dimensions"),
    "5 dimensions": (gguf_bytes(tensors=[tensor("w", [1] * 5)], data=bytes(64)), "5 dimensions"),
    "2^32-1 dimensions": (gguf_bytes(tensors=[tensor("w", [1], num_dims=2**32 - 1)], data=bytes(64)), "dimensions"),
    "dimension 0": (gguf_bytes(tensors=[tensor("w", [4, 0])], data=bytes(64)), "none empty"),
    "negative dimension": (gguf_bytes(tensors=[tensor("w", [2**64 - 1])], data=bytes(64)), "ends at byte"),
    "product overflows": (gguf_bytes(tensors=[tensor("w", [2**32, 2**32])], data=bytes(64)), "ends at byte"),
    "product overflows to 1": (gguf_bytes(tensors=[tensor("w", [2**62, 4])], data=bytes(64)), "ends at byte"),
    "unknown kind": (gguf_bytes(tensors=[tensor("w", [4], kind=4)], data=bytes(64)), "unknown kind 4"),
    "part of a group": (gguf_bytes(tensors=[tensor("w", [33], kind=8)], data=bytes(640)), "groups of 32"),
    "offset past the end": (gguf_bytes(tensors=[tensor("w", [4], offset=2**40)], data=bytes(64)), "ends at byte"),
    "offset overflows": (gguf_bytes(tensors=[tensor("w", [4], offset=2**64 - 32)], data=bytes(64)), "ends at byte"),
    "misaligned": (gguf_bytes(tensors=[tensor("w", [4], offset=8)], data=bytes(64)), "alignment 32"),
    "name twice": (gguf_bytes(tensors=[tensor("w", [4]), tensor("w", [4], offset=32)], data=bytes(64)), "'w' occurs twice"),
    "overlap": (gguf_bytes(tensors=[tensor("w", [16]), tensor("v", [4], offset=32)], data=bytes(64)), "overlaps"),
    "data cut short": (gguf_bytes(tensors=[tensor("w", [16])], data=bytes(63)), "ends at byte"),
    "line break in a name": (gguf_bytes(tensors=[tensor("w\nx" * 100, [16])], data=b""), "ends at byte"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_quickly_in_one_line(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(LoadError) as caught:
        read_gguf(path)
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert reason in message and str(path) in message
    assert "\n" not in message and len(message) < len(str(path)) + 300
    assert seconds < 1 and peak < 10 * 2**20


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(LoadError, match="cannot be read"):
            read_gguf(path)


def test_mutants_end_in_a_load_error_or_a_sound_header(tmp_path: Path) -> None:
    """Random damage to a good header: never another exception, never a tensor outside the file."""
    keys = [string("general.architecture", "llama"), u32("llama.block_count", 2), array("t", STRING, 3, text("a") + text("bc") + text(""))]
    keys += [array("n", U32, 4, bytes(16)), u32("general.alignment", 32)]
    good = gguf_bytes(keys, [tensor("v", [32, 2], kind=8), tensor("w", [4, 4], offset=96)], bytes(160))
    path = tmp_path / "mutant.gguf"
    dice = random.Random(7)
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        mutant = bytearray(good)
        for _ in range(dice.choice([1, 1, 2, 5])):
            at, width = dice.randrange(len(good) - 160), dice.choice([1, 4, 8])
            mutant[at : at + width] = dice.choice([bytes(width), b"\xff" * width, dice.randbytes(width)])
        path.write_bytes(mutant[: dice.choice([len(mutant), dice.randrange(len(mutant))])])
        try:
            read = read_gguf(path)
        except LoadError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert all(0 < t.offset and t.offset + t.num_bytes <= path.stat().st_size for t in read.tensors.values())
    assert min(outcomes.values()) > 50  # the damage is neither always nor never fatal
