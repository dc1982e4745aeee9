"""Ranks that share a model: together they have its weights once, say what it says, and each reads its own part of the files alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.attention.backend import load_backend
from octavo.comm.comm import Comm, NullComm
from octavo.errors import ConfigError, LoadError
from octavo.loading.checkpoint import Checkpoint, FileCheckpoint, GGUFCheckpoint, SafetensorsCheckpoint
from octavo.loading.loader import StoredParameters, load_packed, load_weights, weight_targets
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.loading.sharded import ShardedCheckpoint, of_rank
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, rank_config, read_config
from octavo.models.split import Part, vocabulary_rows
from octavo.quant import packed
from octavo.quant.quant_config import QuantConfig
from octavo.quant.schemes import Packed
from octavo.quant.zero_point import unpack_awq, unpack_gptq
from tests.support.batches import Pool, run_steps
from tests.support.models import tiny_model, to_gguf
from tests.support.packers import Published, published
from tests.support.quantized_models import Kind, write_both
from tests.support.ranks import on_ranks

BACKEND = load_backend("cpu")
VOCAB, HIDDEN, INNER = 97, 48, 96  # the last rank has fewer tokens, whatever the number of ranks
RAW: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 8, "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "dtype": "float32",
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3": {},
}
QUANTISED = {
    "AWQ": Kind(group_size=32),
    "AWQ, groups that ranks share": Kind(group_size=128, architecture="Qwen2ForCausalLM"),
    "GPTQ": Kind("gptq", group_size=32, tie=True),
    "GPTQ of 8 bits, act-order": Kind("gptq", 8, 32, sym=True, act_order=True),
}
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
TEXTS = [[(7 * row + 3 * i * i) % VOCAB for i in range(12)] for row in range(2)]
STEPS = [{0: TEXTS[0][:10]}, {0: TEXTS[0][10:11], 1: TEXTS[1][:11]}, {0: TEXTS[0][11:], 1: TEXTS[1][11:]}]


def raw_config(family: str, **fields: Any) -> dict[str, Any]:
    return RAW | FAMILIES[family] | {"architectures": [f"{family.split()[0]}ForCausalLM"]} | fields


def write_folder(folder: Path, raw: dict[str, Any]) -> Path:
    """A model of random weights, none of them equal."""
    with torch.device("meta"):
        empty = build_model(read_config(raw, "test"), torch.float32, BACKEND, NullComm(), max_len=1)
    dice = torch.Generator().manual_seed(5)
    weights = {name: 0.15 * torch.randn(target.values.shape, generator=dice) for name, target in weight_targets(empty).items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")
    return folder


def open_model(path: Path) -> tuple[ModelConfig, FileCheckpoint]:
    source = resolve_model(str(path))
    return load_model_config(source), open_checkpoint(source)


def dense_model(config: ModelConfig, stored: Checkpoint, comm: Comm) -> Decoder:
    model = build_model(config, torch.float32, BACKEND, comm, 64)
    load_weights(model, stored)
    return model


def packed_model(config: ModelConfig, stored: Checkpoint, comm: Comm) -> Decoder:
    with torch.device("meta"):
        empty = build_model(config, torch.float32, BACKEND, comm, max_len=1)
    model = build_model(config, torch.float32, BACKEND, comm, 64, Packed())
    load_packed(model, StoredParameters(empty, stored))
    return model


def logits(model: Decoder) -> Tensor:
    config: Any = model.config
    spec = config.attention()
    rows = run_steps(model, BACKEND, Pool(config.num_layers, spec.num_kv_heads, spec.head_dim, max_len=64), STEPS)
    return torch.cat([rows[0], rows[1]])


def run_ranks(path: Path, size: int, build: Callable[[ModelConfig, Checkpoint, Comm], Decoder]) -> tuple[list[Decoder], Tensor]:
    config, stored = open_model(path)
    own = rank_config(config, size)

    def work(comm: Comm) -> tuple[Decoder, Tensor]:
        model = build(own, of_rank(stored, config, size, comm.rank), comm)
        return model, logits(model)

    done = on_ranks(size, work)
    return [model for model, _ in done], torch.cat([part for _, part in done], dim=-1)


def joined(name: str, parts: list[Tensor], whole: int) -> Tensor:
    """The parts of all ranks as one. Where they are more than the whole, neighbours have the same."""
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        return torch.stack(parts).sum(0)
    axis = int(name.endswith(BY_COLUMNS))
    copies = sum(part.shape[axis] for part in parts) // whole
    assert all(torch.equal(part, parts[rank // copies * copies]) for rank, part in enumerate(parts))
    return torch.cat(parts[::copies], dim=axis)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("size", "heads"), [(2, {}), (3, {}), (4, {"num_attention_heads": 8, "num_key_value_heads": 2})], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_have_every_weight_once_and_give_the_logits_of_the_whole_model(
    tmp_path: Path, family: str, size: int, heads: dict[str, int], tied: bool
) -> None:
    """Four ranks share two heads of k and v, so that each pair of ranks has the same one."""
    path = write_folder(tmp_path, raw_config(family, tie_word_embeddings=tied, **heads))
    models, found = run_ranks(path, size, dense_model)
    expected = logits(dense_model(*open_model(path), NullComm()))
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    parameters = [weight_targets(model) for model in models]
    for name, whole in load_file(path / "model.safetensors").items():
        parts = [targets[name].values for targets in parameters]
        if name.endswith("norm.weight"):
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert torch.equal(joined(name, parts, whole.shape[int(name.endswith(BY_COLUMNS))]), whole), name


def gguf_path(folder: Path, kind: str) -> Path:
    return to_gguf(tiny_model(folder / "hf", "LlamaForCausalLM", seed=5, vocab=VOCAB), folder / f"{kind}.gguf", kind)


@pytest.mark.parametrize(("name", "size"), [*((name, size) for name in QUANTISED for size in (2, 4)), ("Q8_0", 2), ("Q4_1", 2)])
def test_codes_of_ranks_stand_for_the_codes_of_the_whole(tmp_path: Path, name: str, size: int) -> None:
    """With act-order the columns of a rank are no whole groups: its codes become the floats that they stand for."""
    path = write_both(tmp_path, QUANTISED[name])[0] if name in QUANTISED else gguf_path(tmp_path, name)
    config, stored = open_model(path)
    ranks = [of_rank(stored, config, size, rank) for rank in range(size)]
    kept = 0
    for weight in stored.names():
        whole, codes = stored.packed(weight), [rank.packed(weight) for rank in ranks]
        floats, length = [rank.read(weight) for rank in ranks], stored.shape(weight)[int(weight.endswith(BY_COLUMNS))]
        assert [rank.shape(weight) for rank in ranks] == [tuple(part.shape) for part in floats]
        if "norm" not in weight:
            assert torch.equal(joined(weight, floats, length), stored.read(weight)), weight
        if whole is None or ("act-order" in name and weight.endswith(BY_COLUMNS)):
            assert codes == [None] * size
        else:
            found = [part.dequantize() for part in codes if part is not None]
            assert torch.equal(joined(weight, found, length), whole.dequantize()), weight
            kept += 1
    assert kept >= 10
    expected = logits(packed_model(config, stored, NullComm()))
    assert (run_ranks(path, size, packed_model)[1] - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("rows", [range(5, 19), range(16, 32)])
@pytest.mark.parametrize("columns", [range(32, 96), range(112, 128)])
def test_any_rows_and_whole_groups_of_columns_can_be_cut_out_of_packed_words(rows: range, columns: range) -> None:
    """A word holds 8 rows. Groups of the packed form may be smaller than published ones."""
    source = published(32, 128, 64, 4, seed=3)
    expected = source.weight()[rows.start : rows.stop, columns.start : columns.stop]
    awq = unpack_awq(source.awq("m"), "m", QuantConfig("awq", 4, 64), rows, columns)
    gptq = unpack_gptq(source.gptq("m", first_format=True), "m", QuantConfig("gptq", 4, 64, stored_minus_one=True), rows, columns)
    assert torch.equal(awq.dequantize(), expected) and torch.equal(gptq.dequantize(), expected)
    assert awq.fold().group == gptq.fold().group == (32 if columns.start == 32 else 16)


def test_act_order_within_the_columns_of_a_rank_stays_codes() -> None:
    source, dice = published(16, 128, 32, 4, seed=3), np.random.default_rng(1)
    halves = [list(dice.permutation([group for group in pair for _ in range(32)])) for pair in ((0, 1), (2, 3))]
    source = Published(source.bits, source.codes, source.zeros, source.scales, [int(group) for half in halves for group in half])
    weight = unpack_gptq(source.gptq("m", first_format=True), "m", QuantConfig("gptq", 4, 32, desc_act=True, stored_minus_one=True))
    parts = [weight.of_columns(columns) for columns in (range(64), range(64, 128))]
    assert torch.equal(torch.cat([part.dequantize() for part in parts if part is not None], dim=1), source.weight())
    assert weight.of_columns(range(32)) is None


FIRST_BYTE = torch.ops.aten._local_scalar_dense.default  # of each tensor, which safetensors looks at


class Touched(TorchDispatchMode):
    """Marks the bytes of a mapped file that operations read. A view reads nothing."""

    def __init__(self, checkpoint: FileCheckpoint) -> None:
        super().__init__()
        if isinstance(checkpoint, GGUFCheckpoint):
            spans = [(checkpoint._file._data.data_ptr(), checkpoint._file._data.nbytes)]
        else:
            assert isinstance(checkpoint, SafetensorsCheckpoint)
            stored = [checkpoint._stored(name) for name in checkpoint._file_of]
            spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in stored]
        self.start, self.stop = min(start for start, _ in spans), max(start + size for start, size in spans)
        self.read = np.zeros(self.stop - self.start, bool)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not FIRST_BYTE:
            for value in [*args, *(one for many in args if isinstance(many, (list, tuple)) for one in many)]:
                if isinstance(value, Tensor) and self.start <= value.data_ptr() < self.stop:
                    self._mark(value)
        return func(*args, **(kwargs or {}))

    def _mark(self, value: Tensor) -> None:
        item = value.itemsize
        window = self.read[value.data_ptr() - self.start :]
        strides = (*(item * stride for stride in value.stride()), 1)
        np.lib.stride_tricks.as_strided(window, (*value.shape, item), strides)[...] = True


# Of the last two, only the groups of a rank are picked; the operation is given all of them.
READ_BY_ALL = ("norm.weight", ".qzeros", ".g_idx", "o_proj.scales", "down_proj.scales")


def stored_bytes(checkpoint: FileCheckpoint) -> dict[str, int]:
    if isinstance(checkpoint, GGUFCheckpoint):
        return {name: tensor.num_bytes for name, tensor in checkpoint._gguf.tensors.items()}
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    return {name: checkpoint._stored(name).nbytes for name in checkpoint._file_of}


@pytest.mark.parametrize("name", ["floats", "AWQ", "GPTQ", "Q8_0", "Q4_0"])
def test_a_rank_reads_its_own_part_of_the_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library reads blocks of GGUF files; what it is given is marked as read."""
    unpack = packed.unpack_blocks
    monkeypatch.setattr(packed, "unpack_blocks", lambda raw, kind: unpack(torch.from_numpy(raw).clone().numpy(), kind))
    if name == "floats":
        path = write_folder(tmp_path, raw_config("Llama", vocab_size=96, tie_word_embeddings=False))
    else:
        path = write_both(tmp_path, QUANTISED[name])[0] if name in QUANTISED else gguf_path(tmp_path, name)
    config, stored = open_model(path)
    reads = []
    for rank in range(2):
        with Touched(stored) as touched:
            own = of_rank(stored, config, 2, rank)
            for weight in own.names():
                codes = own.packed(weight)
                if codes is None:
                    torch.empty(own.shape(weight)).copy_(own.read(weight))
        reads.append(touched.read)
    sizes = stored_bytes(stored)
    assert (reads[0] | reads[1]).sum() == sum(sizes.values())
    assert (reads[0] & reads[1]).sum() == sum(size for tensor, size in sizes.items() if tensor.endswith(READ_BY_ALL))


@pytest.mark.parametrize(
    ("fields", "size", "what", "sizes"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 9}, 2, "num_attention_heads 9", "1, 3"),
        ({"num_key_value_heads": 4, "vocab_size": 96}, 6, "num_key_value_heads 4", "1, 2, 4, 12"),
        ({"num_key_value_heads": 3, "vocab_size": 96}, 2, "num_key_value_heads 3", "1, 3, 6, 12"),
        ({"intermediate_size": 99}, 2, "intermediate_size 99", "1, 3"),
        ({"vocab_size": 4}, 3, "vocab_size 4", "1, 2"),
    ],
)
def test_a_number_that_ranks_cannot_share_is_refused_by_its_name(fields: dict[str, int], size: int, what: str, sizes: str) -> None:
    with pytest.raises(ConfigError) as error:
        rank_config(read_config(raw_config("Llama", **fields), "test"), size)
    assert str(error.value) == f"{what} cannot be split over tensor_parallel_size {size}: sizes that can: {sizes}"


def test_columns_that_are_no_whole_groups_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    config, stored = open_model(gguf_path(tmp_path / "gguf", "Q4_0"))
    with Touched(stored) as touched, pytest.raises(ConfigError) as error:
        of_rank(stored, config, 4, 0)
    assert "blk.0.attn_output.weight: 64 columns in groups of 32 cannot be split over tensor_parallel_size 4" in str(error.value)
    assert not touched.read.any()
    _, stored = open_model(write_both(tmp_path, QUANTISED["AWQ"])[0])
    down = "model.layers.0.mlp.down_proj"
    with pytest.raises(ConfigError, match=f"{down}: 256 columns in groups of 32 cannot be split over tensor_parallel_size 32: 8 columns"):
        ShardedCheckpoint(stored, {f"{down}.weight": Part(columns=range(8), whole=256)})


def test_a_weight_of_another_size_is_refused_even_if_it_is_as_large_as_a_part(tmp_path: Path) -> None:
    path = write_folder(tmp_path, raw_config("Llama"))
    config = read_config(raw_config("Llama", num_attention_heads=24), "test")
    with pytest.raises(LoadError, match=r"o_proj.weight has shape \[48, 96\], this model expects 192 columns"):
        of_rank(open_checkpoint(resolve_model(str(path))), config, 2, 0)


def test_ranks_have_runs_of_the_vocabulary_and_fingerprints_of_their_own(tmp_path: Path) -> None:
    runs = [vocabulary_rows(VOCAB, 4, rank) for rank in range(4)]
    assert [token for run in runs for token in run] == list(range(VOCAB)) and [len(run) for run in runs] == [25, 25, 25, 22]
    config, stored = open_model(write_folder(tmp_path, raw_config("Llama")))
    prints = [of_rank(stored, config, size, rank).fingerprint() for size in (1, 2, 3) for rank in range(size)]
    assert len(set(prints)) == 6 and prints[0] == stored.fingerprint()
