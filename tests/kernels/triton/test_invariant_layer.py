"""A layer of `--deterministic`, whose norms are fused into the products of few rows: the same bits as from its modules."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from octavo.attention.backend import load_backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.comm.comm import NullComm
from octavo.kernels.triton.gemv.tiles import FUSED_ROWS
from octavo.model_config import RopeConfig
from octavo.models.dense import DenseLayer, DenseModel
from octavo.models.dense_family import dense_config
from octavo.models.description import NormShape
from octavo.quant.schemes import make_invariant

HIDDEN, BLOCK, CONTEXT, DIM = 48, 16, 40, 16
DTYPES = [torch.float32, torch.bfloat16]


def model(device: str, dtype: torch.dtype, biased: bool) -> DenseModel:
    torch.manual_seed(0)
    config = dense_config({
        "architecture": "Qwen3ForCausalLM", "vocab_size": 99, "hidden_size": HIDDEN, "inner": 80, "num_layers": 2, "num_heads": 6,
        "num_kv_heads": 2, "head_dim": DIM, "max_position": 64, "norm": NormShape(1e-6), "rope": RopeConfig(theta=1e6),
        "tie_embeddings": True, "qkv_bias": biased, "output_bias": False, "mlp_bias": False, "dtype": None, "eos_token_ids": (),
        "qk_norm": None if biased else "heads", "bos_token_id": None,
    })  # fmt: skip
    with torch.device(device):
        made = DenseModel(config, dtype, load_backend("triton", "cuda", deterministic=True), NullComm(), 64)
        for parameter in made.parameters():
            parameter.normal_().mul_(0.2 if parameter.dim() > 1 else 1)
    make_invariant(made)
    for layer in made.layers:
        assert isinstance(layer, DenseLayer)
        layer.make_invariant()
    return made


def batch(made: nn.Module, rows: int, dtype: torch.dtype, device: str) -> ForwardBatch:
    """One new token in each row, behind keys and values that are the same whatever the number of rows."""
    generator = torch.Generator().manual_seed(1)
    width = -(-CONTEXT // BLOCK)
    shape = 1 + width * FUSED_ROWS * 2, BLOCK, 2, DIM
    cache = [{name: torch.randn(shape, generator=generator).to(device, dtype) for name in "kv"} for _ in range(2)]
    whole = torch.arange(rows)
    tables = 1 + torch.arange(rows * width).view(rows, width)
    step = ForwardBatch(
        token_ids=5 + whole, cache_index=torch.full((rows,), CONTEXT - 1, dtype=torch.int32),
        positions=torch.full((1, rows), CONTEXT - 1, dtype=torch.int32), rows=whole, query_start=torch.arange(rows + 1),
        context_len=torch.full((rows,), CONTEXT), tables=tables, slots=tables[:, -1] * BLOCK + (CONTEXT - 1) % BLOCK, sample_index=whole,
        caches=[], block_size=BLOCK, max_query=1,
    )  # fmt: skip
    names = "token_ids", "cache_index", "positions", "rows", "query_start", "context_len", "tables", "slots", "sample_index"
    step = replace(step, caches=cache, **{name: getattr(step, name).to(device) for name in names})
    step.attention = load_backend("triton", "cuda", deterministic=True).prepare(step)
    return step


def hidden(made: DenseModel, rows: int, dtype: torch.dtype, device: str) -> Tensor:
    with torch.inference_mode():
        states: Tensor = made(batch(made, rows, dtype, device))
    return states


# promise: deterministic
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["normed heads", "biases"])
def test_a_layer_of_few_rows_has_the_bits_of_its_modules(biased: bool, dtype: torch.dtype, device: str) -> None:
    made = model(device, dtype, biased)
    more = hidden(made, FUSED_ROWS + 2, dtype, device)
    for rows in (1, 3, FUSED_ROWS):
        assert torch.equal(hidden(made, rows, dtype, device), more[:rows]), rows
    for layer in made.layers:
        assert layer.in_order is not None
        layer.in_order = None
    assert torch.equal(hidden(made, FUSED_ROWS, dtype, device), more[:FUSED_ROWS])
