"""Only tokens that are sampled from go through all of the last layer: they mean what they did, and bad ones beside them still show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo import SamplingParams
from octavo.attention.backend import load_backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.comm.comm import NullComm
from octavo.kernels.reference.rows import _bad_entries
from octavo.models.decoder import Decoder
from octavo.models.dense import DenseModel
from octavo.models.registry import read_config
from tests.support.batches import Pool
from tests.support.models import tiny_model
from tests.support.places import open_engine

RAW = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
WINDOW = 4
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
# A chunk that goes on and samples nothing, prompts with a past, decode beside them, decode alone; each: row -> tokens, and who samples
STEPS: list[tuple[dict[int, int], set[int]]] = [
    ({0: 17, 1: 9}, {1}), ({2: 5, 1: 1, 0: 21}, {1, 2}), ({0: 11, 1: 1, 2: 1}, {0, 1, 2}), ({3: 30}, set()), ({0: 1, 1: 1}, {0, 1}),
]  # fmt: skip


def model_of(backend: str, family: str = "Qwen2", **fields: object) -> DenseModel:
    config = read_config({**RAW, "architectures": [f"{family}ForCausalLM"], **fields}, "test")
    model = DenseModel(config, torch.float32, load_backend(backend), NullComm(), 96)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


def new_pool() -> Pool:
    return Pool(RAW["num_hidden_layers"], kv_heads=2, head_dim=16, max_len=96)  # type: ignore[arg-type]


def batch_of(pool: Pool, backend: str, counts: dict[int, int], samples: set[int]) -> ForwardBatch:
    tokens = {row: [(7 * row + 5 * place + pool.lengths.get(row, 0)) % 97 for place in range(count)] for row, count in counts.items()}
    batch = pool.batch(load_backend(backend), tokens)
    batch.sample_index = batch.sample_index[torch.tensor([row in samples for row in counts])]
    pool.advance(tokens)
    return batch


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(("family", "fields"), [("Llama", {"attention_bias": True}), ("Qwen2", WINDOWS), ("Qwen3", {})], ids=str)
def test_tokens_to_sample_from_mean_what_they_mean_among_all(backend: str, family: str, fields: dict[str, object]) -> None:
    model, pools, widths = model_of(backend, family, **fields), (new_pool(), new_pool()), []
    model.layers[-1].mlp.register_forward_hook(lambda _, given, __: widths.append(len(given[0])))
    with torch.inference_mode():
        for counts, samples in STEPS:
            some, every = (batch_of(pool, backend, counts, samples) for pool in pools)
            hidden, states = model.sampled(some), model(every)
            torch.testing.assert_close(hidden[0], states[every.sample_index], atol=1e-5, rtol=1e-5)
            assert torch.equal(*(model.head(found).argmax(1) for found in (hidden[0], states[every.sample_index])))
            assert widths == [len(samples), sum(counts.values())] and len(hidden[1]) == len(states)
            widths.clear()
    for one, other in zip(*(pool.paged for pool in pools), strict=True):
        assert all(torch.equal(one[name].nan_to_num(99), other[name].nan_to_num(99)) for name in "kv")


def spoil(part: slice, token: int, value: float) -> Callable[[object, object, Tensor], Tensor]:
    def hook(_: object, __: object, qkv: Tensor) -> Tensor:
        qkv[token, part] = value
        return qkv

    return hook


MODELS = {backend: model_of(backend, **WINDOWS) for backend in ("cpu", "triton")}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["cpu", "triton"]), st.integers(0, 2), st.sampled_from([("k", torch.nan), ("v", torch.nan), ("v", torch.inf)]),
    st.integers(0, 26),
)  # fmt: skip
def test_what_is_not_finite_in_a_cache_shows_in_its_own_row_wherever_it_is(
    backend: str, layer: int, spoiled: tuple[str, float], token: int
) -> None:
    """Also where windows hide it from every token that is sampled from."""
    assume((backend, spoiled[0], token) != ("cpu", "k", 5))  # torch does not look at the key of a lone token; the next step does
    model, counts = MODELS[backend], {2: 5, 1: 1, 0: 21}
    qkv = model.layers[layer].attention.qkv
    hook = qkv.register_forward_hook(spoil(qkv.parts[spoiled[0]], token, spoiled[1]))  # type: ignore[arg-type]
    with torch.inference_mode():
        batch = batch_of(new_pool(), backend, counts, set(counts))
        hidden, states = model.sampled(batch)
    hook.remove()
    entry = 0 if token < 5 else 1 if token == 5 else 2
    assert not states[token].isfinite().all()
    assert _bad_entries(states, hidden, batch.query_start.int().numpy(), np.arange(4, dtype=np.int32)) == {entry}


SIZE = 8
BAD = 77


@pytest.mark.parametrize("runner", ["model", "device"])
def test_a_bad_token_in_a_chunk_that_goes_on_seals_nothing(tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad in itself alone, as where windows hide it from all others."""
    original = Decoder.sampled

    def with_bad_token(self: Decoder, batch: ForwardBatch, *layers: Any) -> tuple[Tensor, Tensor]:
        assert len(batch.token_ids) > len(batch.sample_index), "nothing is saved where every token is sampled from"
        hidden, mixed = original(self, batch, *layers)
        mixed[batch.token_ids == BAD, 3] = torch.nan
        return hidden, mixed

    monkeypatch.setattr(Decoder, "sampled", with_bad_token)
    good, greedy = [5] * SIZE, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    engine = {"num_gpu_blocks_override": 40, "max_num_seqs": 4, "max_num_batched_tokens": 5 * SIZE, "block_size": SIZE}
    folder = tiny_model(tmp_path, "Qwen2ForCausalLM", seed=5)
    with open_engine(folder, "cpu", runner, **engine) as llm:  # type: ignore[arg-type]
        for token, end, cached in ((BAD, "error", 0), (6, "length", SIZE)):
            first = llm.generate([good + [token] + [7] * 60], greedy, use_tqdm=False)[0]  # two steps: the first samples nothing
            assert first.outputs[0].finish_reason == end
            assert llm.generate([good + [9] * 20], greedy, use_tqdm=False)[0].num_cached_tokens == cached
            llm.reset_prefix_cache()
