"""Hostile model folders: weights, indexes, paths and configs."""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_files as tiny
from tests.support import tiny_quantized as quantized
from tests.support.hostile_case import Case, Words, folder_case, several

HUGE = 2**63
NOTHING = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}  # a weight without values


def folder_cases() -> list[Case]:
    return [*_safetensors(), *_names(), *_odd_files(), *_configs(), *_quantized(), *_limits()]


def _safetensors() -> list[Case]:
    name = "model.norm.weight"
    header = tiny.weight_header()
    size = len(tiny.safetensors_bytes(header)) - len(tiny.safetensors_bytes(header, b""))

    def weights(case: str, words: str, content: bytes, length: int | None = None) -> Case:
        spoiled = folder_case(121, case, ("model.safetensors", *several(words)), {"model.safetensors": content})

        def build(folder: Path) -> Path:
            spoiled.build(folder)
            if length is not None:
                os.truncate(folder / "model.safetensors", length)
            return folder

        return Case(121, case, build, spoiled.words)

    def entry(case: str, words: str, **changes: Any) -> Case:
        return weights(case, words, tiny.safetensors_bytes({**header, name: {**header[name], **changes}}, bytes(size)))

    start, end = header[name]["data_offsets"]
    return [
        weights("empty", "header", b""),
        weights("2 bytes", "header", b"\1\2"),
        weights("header longer than the file", "eader", tiny.safetensors_bytes(header, length=2**20)),
        weights("header of 150 MB", "header", tiny.safetensors_bytes("{", b"", length=150 * 10**6), length=200 * 10**6),
        weights("header of 2^64-1 bytes", "header", tiny.safetensors_bytes(header, length=2**64 - 1)),
        weights("bad JSON", "eader", tiny.safetensors_bytes("{]", b"")),
        weights("not UTF-8", "eader", struct.pack("<Q", 4) + b"{\xff\xff}"),
        weights("JSON 100,000 deep", "eader", tiny.safetensors_bytes("[" * 100_000, b"")),
        weights("a list", "eader", tiny.safetensors_bytes("[]", b"")),
        weights("cut short", "", tiny.safetensors_bytes(header)[:-1]),
        weights("more data than described", "", tiny.safetensors_bytes(header) + b"x"),
        entry("offsets overlap", "", data_offsets=[start - 8, end - 8]),
        entry("offsets past the end", "", data_offsets=[2**40, 2**40 + 32]),
        entry("offsets 2^63", "", data_offsets=[start, HUGE]),
        entry("offsets backwards", "", data_offsets=[end, start]),
        entry("a hole", "", data_offsets=[start + 4, end]),
        entry("shape says more", "", shape=[9]),
        entry("shape overflows", "", shape=[2**62, 2**62]),
        entry("negative shape", "", shape=[-8]),
        entry("unknown dtype", "", dtype="X9"),
        entry("integers", "stored as I32", dtype="I32"),
    ]


def _names() -> list[Case]:
    index, shards = "model.safetensors.index.json", tiny.sharded_files
    weight_map: dict[str, Any] = json.loads(shards()[index])["weight_map"]
    norm = "model.norm.weight"

    def mapped(group: int, name: str, words: Words, **changes: Any) -> Case:
        return folder_case(group, name, words, {index: {"weight_map": {**weight_map, **changes}}}, shards)

    def with_index(name: str, words: str, count: int, length: int = 0) -> Case:
        """One weight in each file; `length`: of the files' names."""

        def many() -> dict[str, Any]:
            return {"weight_map": {f"w{number}": f"{number}{'x' * length}.safetensors" for number in range(count)}}

        return folder_case(122, name, (index, words), {index: many}, shards)

    def single(name: str, words: Words, header: dict[str, Any]) -> Case:
        return folder_case(122, name, words, {"model.safetensors": tiny.safetensors_bytes(header)})

    header = tiny.weight_header()
    outside = mapped(123, "shard is a link to elsewhere", "out of the model folder", **{norm: "link.safetensors"})

    to_itself = mapped(123, "shard is a link to itself", "cannot be looked up", **{norm: "link.safetensors"})

    def with_loop(folder: Path) -> Path:
        to_itself.build(folder)
        (folder / "link.safetensors").symlink_to(folder / "link.safetensors")
        return folder

    def with_link(folder: Path) -> Path:
        model = outside.build(folder / "model")
        (folder / "elsewhere.safetensors").write_bytes(tiny.safetensors_bytes(tiny.weight_header([norm])))
        (model / "link.safetensors").symlink_to(folder / "elsewhere.safetensors")
        return model

    return [
        mapped(122, "missing shard", "absent.safetensors: not found", **{norm: "absent.safetensors"}),
        mapped(122, "shard lacks a weight", ("a.safetensors", "lacks", "extra.weight"), **{"extra.weight": "a.safetensors"}),
        mapped(122, "shard has one too many", ("a.safetensors", norm), **{norm: "b.safetensors"}),
        mapped(122, "shard is a number", "weight_map", **{norm: 3}),
        folder_case(122, "index is not JSON", (index, "not valid JSON"), {index: "{"}, shards),
        folder_case(122, "index without a map", "weight_map", {index: {"weight_map": []}}, shards),
        with_index("index of 300,000 files", "JSON of more than 250,000 items", 300_000),
        with_index("index of 100,000 files", "names 100,000 weight files, at most 2,048", 100_000),
        with_index("index of long names", "larger than 32 MiB", 34, 10**6),
        single("weight missing", ("1 missing", norm), tiny.weight_header([name for name in tiny.SHAPES if name != norm])),
        single("weight of another shape", (norm, "[4, 2]", "[8]"), header | {norm: header[norm] | {"shape": [4, 2]}}),
        single("weight nobody wants", ("1 unknown", "wxyz"), header | {"wxyz" * 10**4: NOTHING}),
        single("weight named to clear the screen", r"unknown to this model: \x1b[2J", header | {"\x1b[2J": NOTHING}),
        mapped(123, "shard above", "out of the model folder", **{norm: "../a.safetensors"}),
        mapped(123, "shard below and above", "out of the model folder", **{norm: "sub/../a.safetensors"}),
        mapped(123, "shard absolute", "out of the model folder", **{norm: "/etc/passwd"}),
        mapped(123, "shard without a name", "out of the model folder", **{norm: ""}),
        mapped(123, "shard with a NUL", "cannot be looked up", **{norm: "a\0b"}),
        mapped(123, "shard of 600 letters", "cannot be looked up", **{norm: "x" * 600}),
        mapped(123, "shard that is no Unicode", "cannot be looked up", **{norm: "\ud83d"}),
        Case(123, to_itself.name, with_loop, to_itself.words),
        Case(123, outside.name, with_link, outside.words),
    ]


def _odd_files() -> list[Case]:
    sound = folder_case(123, "", "", {})

    def instead(name: str, file: str, words: Words, place: Callable[[Path], object]) -> Case:
        """Something else where `file` should be."""

        def build(folder: Path) -> Path:
            sound.build(folder)
            (folder / file).unlink(missing_ok=True)
            place(folder / file)
            return folder

        return Case(123, name, build, (file, *several(words)))

    def pickled(suffix: str) -> Case:
        files = {"model.safetensors": None, f"pytorch_model{suffix}": b"\x80\x02."}
        return folder_case(124, f"only {suffix}", ("pickled weights", "convert"), files)

    code = "open(__file__ + '.ran', 'w')"
    evil = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}}
    custom = tiny.CONFIG | evil | {"architectures": ["EvilForCausalLM"], "model_type": "evil"}
    return [
        instead("config is a pipe", "config.json", "not a regular file", os.mkfifo),
        instead("tokenizer is a pipe", "tokenizer.json", "not a regular file", os.mkfifo),
        instead("config is a folder", "config.json", "not a regular file", Path.mkdir),
        instead("config is without end", "config.json", "not a regular file", lambda path: path.symlink_to("/dev/zero")),
        instead("tokenizer is a link to itself", "tokenizer.json", "cannot be read", lambda path: path.symlink_to(path)),
        instead("weights are a link out", "model.safetensors", "out of the model folder", lambda path: path.symlink_to("/etc/passwd")),
        pickled(".bin"), pickled(".pt"), pickled(".pth"),
        folder_case(125, "custom model code", "supported: LlamaForCausalLM", {"config.json": custom, "modeling_evil.py": code}),
    ]  # fmt: skip


def _configs() -> list[Case]:
    def setting(name: str, value: Any, words: Words = (), case: str = "") -> Case:
        spoiled = tiny.changed(tiny.CONFIG, name, value)
        return folder_case(126, case or f"{name} {value}"[:60], words or name.rpartition(".")[2], {"config.json": spoiled})

    def config(name: str, words: str, content: Any) -> Case:
        return folder_case(126, name, ("config.json", words), {"config.json": content})

    generation = "generation_config.json"
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    return [
        config("missing", "lacks config.json", None),
        config("bad JSON", "not valid JSON", '{"a": '),
        config("not UTF-8", "not UTF-8", b'{"a": "\xff"}'),
        config("a list", "must be a JSON object", []),
        config("100,000 deep", "nested too deep", "[" * 100_000),
        config("of 70 MB", "larger than", lambda: b" " * 70 * 2**20),
        config("of 2 million lists", "items", lambda: "[" + "[]," * 2_100_000 + "1]"),
        config("a number of 5,000 digits", "not valid JSON", '{"a": ' + "9" * 5000 + "}"),
        setting("architectures", ["GPT2LMHeadModel"], "supported: LlamaForCausalLM"),
        setting("architectures", None, "supported: LlamaForCausalLM"),
        setting("architectures", [["LlamaForCausalLM"]], "supported: LlamaForCausalLM"),
        setting("num_attention_heads", 0),
        setting("num_attention_heads", 10**9),
        setting("num_attention_heads", "2"),
        setting("num_attention_heads", [[[[]]]]),
        setting("num_key_value_heads", 3, "num_key_value_heads 3"),
        setting("head_dim", 3),
        setting("vocab_size", 17, ("model.embed_tokens.weight", "[16, 8]", "[17, 8]")),
        setting("vocab_size", 2**24, "shape"),
        setting("hidden_size", 2**20, "shape"),
        setting("num_hidden_layers", 10**9),
        setting("num_hidden_layers", 0),
        setting("num_hidden_layers", 1000, "missing"),
        setting("hidden_act", "gelu"),
        setting("rms_norm_eps", math.inf),
        setting("rope_parameters.factor", math.nan),
        setting("rope_parameters.factor", 0),
        setting("rope_parameters.factor", 1e300),
        setting("rope_parameters.rope_theta", 1),
        setting("rope_parameters.rope_theta", 10**400, case="rope_theta of 400 digits"),
        setting("rope_parameters.rope_type", "dynamic", "supported: default"),
        setting("rope_parameters", llama3, "high_freq_factor"),
        setting("rope_parameters", [1], "rope"),
        setting("eos_token_id", ["a"]),
        setting("dtype", 5),
        folder_case(126, "generation_config is not JSON", ("generation_config.json", "not valid JSON"), {generation: "nope"}),
        folder_case(126, "generation_config end is text", ("generation_config.json", "eos_token_id"), {generation: {"eos_token_id": "x"}}),
    ]  # fmt: skip


def _quantized() -> list[Case]:
    query, norm = "model.layers.0.self_attn.q_proj", "model.norm.weight"

    def said(name: str, method: str, changes: dict[str, Any], words: Words) -> Case:
        """Another quantization_config."""
        table = (quantized.AWQ if method == "awq" else quantized.GPTQ) | changes
        config = quantized.CONFIG | {"quantization_config": table}
        return folder_case(128, name, words, {"config.json": config}, lambda: quantized.quantized_files(method))

    def stored(name: str, method: str, part: str, change: tuple[str, list[int]] | None, words: Words) -> Case:
        """Another tensor of q_proj, or none."""
        shapes = quantized.shapes(method)
        shapes.pop(f"{query}.{part}", None)
        if change is not None:
            shapes[f"{query}.{part}"] = change
        spoiled = {"model.safetensors": quantized.safetensors(shapes)}
        return folder_case(128, name, (f"{query}.{part}", *several(words)), spoiled, lambda: quantized.quantized_files(method))

    config = ("config.json", "quantization_config")
    packed = {**tiny.weight_header(), f"{query}.qweight": NOTHING | {"dtype": "I32"}}
    whole_norm = {"model.safetensors": quantized.safetensors(quantized.shapes("awq") | {norm: ("I32", [quantized.HIDDEN])})}
    long_name = {"model.safetensors": quantized.safetensors(quantized.shapes("awq") | {"wxyz" * 10**4 + ".qweight": ("I32", [32, 1])})}
    twice = {"model.safetensors": quantized.safetensors(quantized.shapes("awq") | {f"{query}.weight": ("F32", [8, 32])})}
    floats = {"config.json": tiny.CONFIG | {"quantization_config": quantized.AWQ}}
    return [
        said("AWQ of 3 bits", "awq", {"bits": 3}, (*config, "bits is 3, supported: 4")),
        said("GPTQ of 3 bits", "gptq", {"bits": 3}, (*config, "bits is 3, supported: 4, 8")),
        said("AWQ of another version", "awq", {"version": "gemv"}, (*config, "version is 'gemv', supported: gemm")),
        said("GPTQ in a layout of a kernel", "gptq", {"checkpoint_format": "marlin"}, (*config, "checkpoint_format is 'marlin'")),
        said("quantised in an unknown way", "awq", {"quant_method": "hqq"}, (*config, "quant_method is 'hqq', supported: awq, gptq, fp8")),
        said("FP8 without floats of 8 bits", "awq", {"quant_method": "fp8"}, "qweight is stored as I32"),
        said("compressed without groups", "awq", {"quant_method": "compressed-tensors"}, (*config, "config_groups is '(missing)'")),
        said("GPTQ of an odd group size", "gptq", {"group_size": 7}, ("qweight", "groups of 7 in rows of 32")),
        said("AWQ of another group size", "awq", {"group_size": 16}, ("qzeros is [1, 1], expected [2, 1]", "group_size 16")),
        said("AWQ of a group size of 2^31-1", "awq", {"group_size": 2**31 - 1}, "groups of 2147483647 in rows of 32"),
        said("GPTQ of other bits", "gptq", {"bits": 8}, ("q_proj.qzeros is [1, 1], expected [1, 2]", "16 input columns", "8 bits")),
        said("AWQ called GPTQ", "awq", {"quant_method": "gptq"}, "q_proj.qweight has 1 output rows, not a multiple of 8"),
        folder_case(128, "config is a list", config, {"config.json": tiny.CONFIG | {"quantization_config": ["x"]}}),
        folder_case(128, "AWQ without codes", "there is no weight named *.qweight", floats),
        folder_case(128, "GPTQ unsaid", "q_proj.qweight is stored as I32", {"model.safetensors": tiny.safetensors_bytes(packed)}),
        folder_case(128, "integers elsewhere", f"{norm} is stored as I32", whole_norm, quantized.quantized_files),
        folder_case(128, "codes with a long name", "wxyzwxyz", long_name, quantized.quantized_files),
        stored("AWQ without zeros", "awq", "qzeros", None, "is missing"),
        stored("AWQ without scales", "awq", "scales", None, "is missing"),
        stored("AWQ with zeros of another shape", "awq", "qzeros", ("I32", [1, 4]), "is [1, 4], expected [1, 1] (32 input columns"),
        stored("AWQ with scales the other way round", "awq", "scales", ("F16", [8, 1]), "is [8, 1], expected [1, 8]"),
        stored("AWQ with scales that are codes", "awq", "scales", ("I32", [1, 8]), "stored as I32"),
        stored("AWQ with codes that are floats", "awq", "qweight", ("F32", [32, 1]), "is torch.float32, expected torch.int32"),
        stored("AWQ with codes of one dimension", "awq", "qweight", ("I32", [32]), "is [32], expected [any, any]"),
        stored("AWQ with no codes in it", "awq", "qweight", ("I32", [32, 0]), "is [32, 0]"),
        stored("AWQ with half of the codes", "awq", "qweight", ("I32", [16, 1]), "has 16 input columns, not a multiple of group_size 32"),
        stored("AWQ with an order", "awq", "g_idx", ("I32", [32]), "is stored as I32"),
        folder_case(128, "AWQ beside its floats", f"{query} exists twice", twice, quantized.quantized_files),
        stored("FP8 without scales", "fp8", "weight_scale_inv", None, ()),
        stored("FP8 with scales of other blocks", "fp8", "weight_scale_inv", ("F32", [2, 1]), "is [2, 1], expected [1, 1] (8 output rows"),
        stored("FP8 of another kind", "fp8", "weight", ("F8_E5M2", [8, 32]), "is stored as F8_E5M2"),
        stored("FP8 of one dimension", "fp8", "weight", ("F8_E4M3", [32]), "is [32], expected [any, any]"),
        stored("words without scales", "words", "weight_scale", None, "is missing"),
        stored("words with scales of another shape", "words", "weight_scale", ("F16", [1, 8]), "is [1, 8], expected [8, 1]"),
        stored("words of 64 bits", "words", "weight_packed", ("I64", [8, 4]), "is stored as I64"),
        stored("words with another shape", "words", "weight_shape", ("I64", [3]), "is [3], expected [2]"),
        stored("words with an order of another length", "words", "weight_g_idx", ("I32", [16]), "is [16], expected [32]"),
        stored("GPTQ with an order of another length", "gptq", "g_idx", ("I32", [16]), "is [16], expected [32]"),
        stored("GPTQ with an order of 64 bits", "gptq", "g_idx", ("I64", [32]), "stored as I64"),
        stored("GPTQ with an order of floats", "gptq", "g_idx", ("F32", [32]), "is torch.float32, expected torch.int32"),
    ]


def _limits() -> list[Case]:
    sound = folder_case(129, "", "", {})

    def forbidden(name: str, file: str, words: Words) -> Case:
        def build(folder: Path) -> Path:
            (sound.build(folder) / file).chmod(0)
            return folder

        return Case(130, name, build, ("Permission denied", *several(words)))

    small = ("--kv-cache-memory-bytes", "2000", "--max-model-len", "60")
    return [
        Case(129, "pool below the length asked for", sound.build, ("largest --max-model-len that fits",), small),
        Case(129, "pool below two blocks", sound.build, ("raise --kv-cache-memory-bytes to",), ("--kv-cache-memory-bytes", "100")),
        Case(130, "no such folder", lambda folder: folder / "nothing", ("not found", "a model is")),
        forbidden("folder may not be read", ".", "cannot be read"),
        forbidden("config may not be read", "config.json", "config.json"),
        forbidden("tokenizer may not be read", "tokenizer.json", "tokenizer.json"),
        forbidden("weights may not be read", "model.safetensors", "model.safetensors"),
    ]
