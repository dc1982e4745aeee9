"""Ranks that share a model with recurrent layers: together they have each weight once, and compute its logits, from every kind of file."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.cpu import CpuBackend
from octavo.comm.comm import Comm, NullComm
from octavo.loading.loader import load_weights, weight_targets
from octavo.loading.sharded import of_rank
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, rank_config, rank_parts
from octavo.quant.fp8 import folded
from tests.support.families import VOCAB, family_model
from tests.support.hybrids import HYBRIDS, Row, Steps, opened
from tests.support.hybrids_gguf import hybrid_gguf
from tests.support.ranks import on_ranks
from tests.support.soaked import rarely

RANKS = 2
CLOSE = 5e-4  # the same sums in another order, through four layers, of logits of a standard deviation of 2
IDS = [Random(7).randrange(3, VOCAB) for _ in range(20)]


def logits(model: Decoder) -> Tensor:
    """Of a text in two steps: the second reads the state that the first has written."""
    steps = Steps(model)
    return torch.cat([*steps.run(Row(0, IDS[:9], read=0, write=1)), *steps.run(Row(0, IDS[9:], read=1, write=2))])


def built(config: Any, stored: Any, comm: Comm) -> Decoder:
    with torch.inference_mode():
        model = build_model(config, torch.float32, CpuBackend, comm, max_len=config.max_position)
        load_weights(model, stored)
    return model


def expected(whole: Tensor, part: Any) -> Tensor:
    """The numbers of a rank, by the rows and columns that it is said to have."""
    rows = torch.cat([whole[run.start : run.stop] for run in part.runs or [part.rows or range(len(whole))]])
    return rows if part.columns is None else rows[:, part.columns.start : part.columns.stop]


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3.5", "gguf"), ("qwen3-next", "folder"),
     *rarely(("qwen3.5", "folder"), ("qwen3.5 moe", "folder"), ("qwen3-next, some mlps", "folder"), ("qwen3-next", "gguf"))],
)  # fmt: skip
def test_ranks_of_a_hybrid_have_every_weight_once_and_give_its_logits(name: str, form: str, tmp_path: Path) -> None:
    path = family_model(tmp_path / "model", HYBRIDS[name], seed=41)
    if form == "gguf":
        path = hybrid_gguf(path, tmp_path / "model.gguf", HYBRIDS[name])
    config, stored = opened(path)
    own = rank_config(config, RANKS)

    def work(comm: Comm) -> tuple[Decoder, Tensor]:
        model = built(own, of_rank(stored, config, RANKS, comm.rank), comm)
        return model, logits(model)

    ranks = on_ranks(RANKS, work)
    whole = logits(built(config, stored, NullComm()))
    assert whole.std() > 0.5 and (torch.cat([part for _, part in ranks], dim=-1) - whole).abs().max() < CLOSE
    sizes: dict[str, int] = {}
    for rank, (model, _) in enumerate(ranks):
        parts = rank_parts(config, RANKS, rank)
        for weight, target in weight_targets(model).items():
            values = stored.read(weight)
            if weight in parts and not parts[weight].zeros:
                sizes[weight] = sizes.get(weight, 0) + target.values.numel()
                values = expected(values, parts[weight])
            assert torch.equal(target.values, values + target.plus), (weight, rank)
    repeated = [weight for weight, size in sizes.items() if size != stored.read(weight).numel()]
    shared = {part for part in ("self_attn", "in_proj_qkv", "conv1d") if any(part in weight for weight in repeated)}
    assert shared == ({"in_proj_qkv", "conv1d"} if name == "qwen3-next, some mlps" else {"self_attn"} if name == "qwen3.5 moe" else set())


@pytest.mark.parametrize("v_dim", [32, 16])  # whole groups, and halves of them
def test_columns_of_v_heads_in_a_gguf_file_are_split_in_the_order_of_the_model(v_dim: int, tmp_path: Path) -> None:
    """Heads of whole groups stay quantised. Others become floats: the file has no groups of a rank's columns alone."""
    tiny = HYBRIDS["qwen3.5"]
    options = tiny.options | {"hidden_size": 64, "intermediate_size": 64, "linear_num_value_heads": 4, "linear_value_head_dim": v_dim}
    tiny = type(tiny)(tiny.architecture, options, tiny.gguf, less=tiny.less)
    folder = family_model(tmp_path / "model", tiny, seed=42)
    config, file = opened(hybrid_gguf(folder, tmp_path / "model.gguf", tiny, kind="Q8_0"))
    weights = [weight for weight in file.names() if weight.endswith("linear_attn.out_proj.weight")]
    assert len(weights) == 3
    for rank in range(RANKS):
        own, parts = of_rank(file, config, RANKS, rank), rank_parts(config, RANKS, rank)
        for weight in weights:
            values, codes = own.read(weight), own.packed(weight)
            assert torch.equal(values, expected(file.read(weight), parts[weight]))
            assert (codes is not None) == (v_dim == 32)
            assert codes is None or torch.equal(folded(codes).dequantize(), values)
