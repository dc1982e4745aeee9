"""Hostile GGUF files: headers, tensors, vocabularies and metadata that no writer would write. Large files are sparse."""

import math
import struct
from collections.abc import Mapping

from tests.support import tiny_files as tiny
from tests.support.gguf_bytes import ARRAY, F32, STRING, U64, array, f32, gguf_bytes, key, string, tensor, text, u32
from tests.support.hostile_case import Case, gguf_case, keys_case

HUGE = 2**63


def gguf_cases() -> list[Case]:
    return [*_gguf_headers(), *_gguf_tensors(), *_gguf_vocabulary(), *_gguf_models()]


def _tensors(name: str, words: str, changes: Mapping[str, bytes], size: int | None = None) -> Case:
    return gguf_case(118, name, words, tiny.gguf_file(None, {**tiny.gguf_tensors()[0], **changes}, size))


def _gguf_headers() -> list[Case]:
    one = [u32("a.b", 1)]
    alignment = "general.alignment"
    nested = struct.pack("<IQ", ARRAY, 1) * 50_000
    many = b"".join(u32(f"k{i}", i) for i in range(70_000))
    return [
        gguf_case(115, "empty", "not a GGUF file", b""),
        gguf_case(115, "magic alone", "not a GGUF file", b"GGUF"),
        gguf_case(115, "wrong magic", "not a GGUF file", b"PK\3\4" + bytes(100)),
        *[gguf_case(115, f"version {v}", f"version {v}", gguf_bytes(one, version=v)) for v in (0, 1, 4, 2**32 - 1, 3 << 24)],
        gguf_case(115, "2^63 keys", f"{HUGE} keys", gguf_bytes(one, num_keys=HUGE)),
        gguf_case(115, "2^63 tensors", f"{HUGE} tensors", gguf_bytes(one, num_tensors=HUGE)),
        gguf_case(115, "2^33 tensors in a sparse file", "tensors", gguf_bytes(one, num_tensors=2**33), size=2**40),
        gguf_case(116, "string longer than the file", "longer than the file", gguf_bytes([key("a", STRING, text("x", length=HUGE))])),
        gguf_case(116, "string of 3 GiB", "string of", gguf_bytes([key("a", STRING, text("", length=3 * 2**30))]), size=2**33),
        gguf_case(116, "string of 32 MiB", "at most", gguf_bytes([key("a", STRING, text("", length=2**25))]), size=2**26),
        gguf_case(116, "key longer than the file", "longer than the file", gguf_bytes([text("k", length=2**64 - 1)], data=bytes(32))),
        gguf_case(116, "key of length 0", "name of a key has 0", gguf_bytes([u32("", 1)])),
        gguf_case(116, "key of 70,000 letters", "70000 characters", gguf_bytes([u32("k" * 70_000, 1)])),
        gguf_case(116, "key that is not UTF-8", "not UTF-8", gguf_bytes([key(b"\xff\xfe", 4, bytes(4))])),
        gguf_case(116, "unknown value type", "unknown value type 13", gguf_bytes([key("a", 13, bytes(8))])),
        gguf_case(116, "unknown element type", "unknown value type 99", gguf_bytes([array("a", 99, 1, bytes(8))])),
        gguf_case(116, "key twice", "'a' occurs twice", gguf_bytes([u32("a", 1), u32("a", 2)])),
        gguf_case(116, "70,000 keys", "at most 65536", gguf_bytes([many], num_keys=70_000)),
        gguf_case(116, "array of 2^63 strings", f"{HUGE} elements", gguf_bytes([array("a", STRING, HUGE)])),
        gguf_case(116, "array longer than the file", "needs 4000000 bytes", gguf_bytes([array("a", F32, 10**6, bytes(16))])),
        gguf_case(116, "strings longer than the file", "needs 8000000 bytes", gguf_bytes([array("a", STRING, 10**6, bytes(16))])),
        gguf_case(116, "arrays 50,000 deep", "nest deeper", gguf_bytes([key("a", ARRAY, nested)])),
        *[keys_case(117, f"alignment {a}", alignment, {alignment: u32(alignment, a)}) for a in (0, 1, 3, 2**31)],
        keys_case(117, "alignment 2^40", alignment, {alignment: key(alignment, U64, struct.pack("<Q", 2**40))}),
        keys_case(117, "alignment a string", alignment, {alignment: string(alignment, "32")}),
        keys_case(117, "alignment a float", alignment, {alignment: f32(alignment, 32.0)}),
    ]


def _gguf_tensors() -> list[Case]:
    embedding = "token_embd.weight"
    size = tiny.gguf_tensors()[1]
    return [
        _tensors("0 dimensions", "0 dimensions", {embedding: tensor(embedding, [])}),
        _tensors("5 dimensions", "5 dimensions", {embedding: tensor(embedding, [1] * 5)}),
        _tensors("2^32-1 dimensions", "dimensions", {embedding: tensor(embedding, [1], num_dims=2**32 - 1)}),
        _tensors("dimension 0", "none empty", {embedding: tensor(embedding, [8, 0])}),
        _tensors("negative dimension", "ends at byte", {embedding: tensor(embedding, [2**64 - 1])}),
        _tensors("product overflows", "ends at byte", {embedding: tensor(embedding, [2**32, 2**32])}),
        _tensors("product overflows to 16", "ends at byte", {embedding: tensor(embedding, [2**62, 16])}),
        _tensors("unknown kind", "unknown kind 4", {embedding: tensor(embedding, [8, 16], kind=4)}),
        _tensors("kind that is not read", "is of kind I32", {embedding: tensor(embedding, [8, 16], kind=26)}),
        _tensors("part of a group", "groups of 32", {embedding: tensor(embedding, [33], kind=8)}),
        _tensors("offset past the end", "ends at byte", {embedding: tensor(embedding, [8, 16], offset=2**40)}),
        _tensors("offset overflows", "ends at byte", {embedding: tensor(embedding, [8, 16], offset=2**64 - 32)}),
        _tensors("misaligned", "alignment 32", {embedding: tensor(embedding, [8, 16], offset=8)}),
        _tensors("overlap", "overlaps", {"output_norm.weight": tensor("output_norm.weight", [8], offset=32)}),
        _tensors("name twice", "occurs twice", {"again": tensor(embedding, [8], offset=size)}, size + 32),
        _tensors("data cut short", "ends at byte", {}, size - 100),
        _tensors("another shape", "embed_tokens.weight has shape [16, 4]", {embedding: tensor(embedding, [4, 16])}),
        _tensors("escape codes in a name", r"\x1b[2J", {"evil": tensor("\x1b[2J", [8], offset=size)}, size + 32),
        _tensors("rope factors without end", "rope_freqs", {"r": tensor("rope_freqs.weight", [2**20], offset=size)}, size + 2**22),
    ]


def _gguf_vocabulary() -> list[Case]:
    ggml, pieces = "tokenizer.ggml.", tiny.sentencepiece_keys()
    scores, kinds, template = f"{ggml}scores", f"{ggml}token_type", "tokenizer.chat_template"
    giant = array(f"{ggml}tokens", STRING, 16, text("", length=2**31 + 1))
    long_piece = tiny.strings(f"{ggml}tokens", [*tiny.TOKENS[:13], "a" * 10**6, *tiny.TOKENS[14:]])
    long_special = tiny.strings(f"{ggml}tokens", [*tiny.TOKENS[:15], "a" * 10**6])
    repeated = tiny.strings(f"{ggml}tokens", [*tiny.TOKENS[:15], "a"])
    others = {name: value for name, value in tiny.gguf_keys().items() if name != f"{ggml}tokens"}
    large = tiny.strings(f"{ggml}tokens", [*tiny.TOKENS, "y"])
    types = tiny.numbers(kinds, [1] * 17)
    all_special = {f"{ggml}merges": tiny.strings(f"{ggml}merges", [])}
    all_special |= {f"{ggml}tokens": tiny.strings(f"{ggml}tokens", [f"t{i}" for i in range(70_000)])}
    all_special[kinds] = tiny.numbers(kinds, [3] * 70_000)
    return [
        gguf_case(119, "token above 2^31 bytes", "string of 2147483649 bytes", gguf_bytes([*others.values(), giant]), size=3 * 2**30),
        keys_case(119, "piece of a million letters", "1,000,000 characters", {f"{ggml}tokens": long_piece}, pieces),
        keys_case(119, "special token of a million letters", "1,000,005 characters", {f"{ggml}tokens": long_special}),
        keys_case(119, "70,000 special tokens", "70,000 tokens", all_special),
        keys_case(119, "fewer scores than tokens", "scores has 2 items", {scores: array(scores, F32, 2, bytes(8))}, pieces),
        keys_case(119, "scores that are no numbers", "scores", {scores: array(scores, F32, 16, b"\xff" * 64)}, pieces),
        keys_case(119, "fewer types than tokens", "token_type has 2 items", {kinds: tiny.numbers(kinds, [1, 1])}),
        keys_case(119, "no end of a text", "eos_token_id is missing", {f"{ggml}eos_token_id": None}),
        keys_case(119, "end outside the vocabulary", "eos_token_id", {f"{ggml}eos_token_id": u32(f"{ggml}eos_token_id", 16)}),
        keys_case(119, "token twice", "'a' more than once", {f"{ggml}tokens": repeated}),
        keys_case(119, "no tokens", "tokens is missing", {f"{ggml}tokens": None}),
        keys_case(119, "tokens a string", "tokens must be a list", {f"{ggml}tokens": string(f"{ggml}tokens", "abc")}),
        keys_case(119, "merges of three", "merges", {f"{ggml}merges": tiny.strings(f"{ggml}merges", ["a b c"])}),
        keys_case(119, "merges of unknown tokens", "merges", {f"{ggml}merges": tiny.strings(f"{ggml}merges", ["a z"])}),
        keys_case(119, "unknown split", "supported: bloom", {f"{ggml}pre": string(f"{ggml}pre", "z" * 10**6)}),
        keys_case(119, "more tokens than rows", "vocabulary ends at 15", {f"{ggml}tokens": large, kinds: types}),
        keys_case(119, "template that is not valid", "chat template", {template: string(template, "{% x %}")}),
    ]


def _gguf_models() -> list[Case]:
    def integer(name: str, value: int, words: str | None = None) -> Case:
        return keys_case(120, f"{name} {value}", words or name, {f"llama.{name}": u32(f"llama.{name}", value)})

    heads, blocks, eps = "llama.attention.head_count", "llama.block_count", "llama.attention.layer_norm_rms_epsilon"
    family = "general.architecture"
    without_embedding = {name: entry for name, entry in tiny.gguf_tensors()[0].items() if name != "token_embd.weight"}
    return [
        integer("block_count", 0),
        integer("block_count", 2, "missing: model.layers.1."),
        integer("block_count", 2**32 - 1),
        integer("attention.head_count", 0),
        integer("attention.head_count", 3, "each of 3 heads"),
        integer("attention.head_count_kv", 0),
        integer("context_length", 0),
        integer("feed_forward_length", 2**21, "shape"),
        integer("rope.dimension_count", 3, "head_dim"),
        integer("expert_count", 8),
        keys_case(120, "block_count a string", blocks, {blocks: string(blocks, "1")}),
        keys_case(120, "head_count an array", heads, {heads: tiny.numbers(heads, [2] * 10**6)}),
        keys_case(120, "no embedding_length", "embedding_length", {"llama.embedding_length": None}),
        keys_case(120, "epsilon NaN", eps, {eps: f32(eps, math.nan)}),
        keys_case(120, "rope base 1", "rope_theta", {"llama.rope.freq_base": f32("llama.rope.freq_base", 1.0)}),
        keys_case(120, "another architecture", "supported: llama", {family: string(family, "mamba" * 10**5)}),
        gguf_case(120, "no embedding", "token_embd.weight", tiny.gguf_file(None, without_embedding)),
        gguf_case(120, "a vocabulary alone", "token_embd.weight", tiny.gguf_file(None, {})),
    ]
