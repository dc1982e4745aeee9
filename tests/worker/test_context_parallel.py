"""Ranks that share out the tokens of a context: the texts of one process, whatever the schedule, and refusals by name."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.cli.verify import LEAST_REQUESTS
from octavo.config import EngineConfig
from octavo.errors import ConfigError, RankLost, VerifyError
from octavo.models.registry import describe, rank_config, rank_parts, read_config
from octavo.models.stages import ONLY, one_table
from octavo.outputs import RequestOutput
from octavo.policy.cache_spec import Buffer, LayerCacheSpec, one_group
from octavo.sizing.auto import resolved, suited
from octavo.sizing.memory_plan import ModelNeeds
from octavo.worker.facts import Facts
from octavo.worker.host_ranks import HostMeeting
from octavo.worker.places import Ends, join
from tests.loading.test_sharded import raw_config
from tests.support.models import tiny_model
from tests.support.rank_code import change_ranks
from tests.worker.test_ranks import proven

VOCAB, SIZE, BLOCKS = 320, 8, 21  # a rank keeps 20 * 8 tokens
ASKS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "seed": 7, "n": 3},  # forks that share blocks, and copy on write
    {"temperature": 0.9, "top_k": 5, "presence_penalty": 0.5},
    {"temperature": 0, "prompt_logprobs": 1},
]
LONG = 290  # tokens of a prompt


def opened(folder: Path, ranks: int, context: int, block_size: int, **settings: Any) -> LLM:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 330, "num_gpu_blocks_override": BLOCKS}
    sizes = {"tensor_parallel_size": ranks, "decode_context_parallel_size": context, "block_size": block_size}
    return LLM(str(folder), skip_tokenizer_init=True, **(limits | sizes | settings))


def said(llm: LLM) -> tuple[list[RequestOutput], tuple[int, ...]]:
    """Returns the answers to all asks, and how often what happened on the way."""
    rng = Random(11)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    lengths = [1, 15, 40, 90] * 2
    prompts = [shared * (number % 2) + [rng.randrange(VOCAB) for _ in range(length)] for number, length in enumerate(lengths)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **ASKS[number % 4]) for number in range(8)]
    with llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate([*prompts[:4], [rng.randrange(VOCAB) for _ in range(LONG)]], [*params[:4], params[0]], use_tqdm=False)
        stats = llm.stats()
    return outputs, (stats.prefix_hits, stats.preemptions)


# promise: decode-context-parallel-size, llm-decode-context-parallel-size
@pytest.mark.parametrize(
    ("architecture", "shape", "ranks", "debug"),
    [
        pytest.param("LlamaForCausalLM", {"heads": 4, "kv_heads": 2}, 2, "check=1", marks=pytest.mark.soak),
        pytest.param(
            *("Qwen2ForCausalLM", {"heads": 4, "kv_heads": 2, "tie": True, "window": 20}, 4, "check=1"), marks=pytest.mark.soak
        ),
        ("Qwen3ForCausalLM", {"heads": 6, "kv_heads": 3, "hidden": 96}, 2, "runner=device"),  # 3 heads of k and v on each
    ],
)
def test_ranks_that_share_a_context_say_what_one_says(
    architecture: str, shape: dict[str, Any], ranks: int, debug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is longer than all that one rank keeps. Unwritten blocks are NaN, or steps are padded.

    Alone, layers with a window have a block table of their own.
    """
    folder, windows = tiny_model(tmp_path, architecture, seed=3, **shape), "window" in shape
    alone, happened = said(opened(folder, 1, 1, 2 * SIZE, native=False, num_gpu_blocks_override=BLOCKS * (1 + windows)))
    monkeypatch.setenv("OCTAVO_DEBUG", debug)
    together, happened_too = said(opened(folder, ranks, 2, SIZE))
    assert LONG > (BLOCKS - 1) * SIZE and len(together[-1].outputs[0].token_ids) == 24
    assert (windows or happened == happened_too) and min(happened_too) > 0
    for one, other in zip(alone, together, strict=True):
        assert one.num_cached_tokens == other.num_cached_tokens
        for sample, another in zip(one.outputs, other.outputs, strict=True):
            assert sample.token_ids == another.token_ids
            for choices, others in zip(sample.logprobs or [], another.logprobs or [], strict=True):
                assert {token: found.logprob for token, found in choices.items()} == pytest.approx(
                    {token: found.logprob for token, found in others.items()}, abs=1e-4
                )


def test_a_cache_of_codes_is_shared_out_too(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "LlamaForCausalLM", seed=3)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    prompt = [Random(5).randrange(VOCAB) for _ in range(70)]
    found = []
    for llm in (opened(folder, 1, 1, 2 * SIZE, native=False, kv_cache_dtype="int8"), opened(folder, 2, 2, SIZE, kv_cache_dtype="int8")):
        with llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        found.append([next(iter(place.values())).logprob for place in output.prompt_logprobs or [] if place])
    assert len(found[0]) == 69 and found[0] == pytest.approx(found[1], abs=1e-3)


def test_groups_meet_apart_from_each_other_and_name_who_is_missing() -> None:
    config = EngineConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    meeting = HostMeeting(config)
    last, second = (join(meeting.ends[rank], rank, config, seconds) for rank, seconds in ((3, 0.2), (1, 60)))
    assert (last.context.rank, last.context.size, last.comm.rank, last.comm.size) == (1, 2, 3, 4)
    with pytest.raises(RankLost, match=r"rank 2 did not answer for 0\.2 s"):
        last.context.all_gather(torch.ones(1))
    meeting.abort()
    for comm in (second.context, second.comm):
        with pytest.raises(RankLost, match="rank 0 gave up, so rank 1 cannot go on"):
            comm.all_gather(torch.ones(1))
    meeting.leave()
    assert join(Ends(), 2, EngineConfig(pipeline_parallel_size=3), 1).context.size == 1


def test_a_group_has_the_same_heads_of_k_and_v_and_shares_those_of_q() -> None:
    config = read_config(raw_config("Llama", num_attention_heads=8, num_key_value_heads=4, vocab_size=96), "test")
    own: Any = rank_config(config, 4, 2)
    assert (own.attention().num_heads, own.attention().num_kv_heads, own.attention().context_ranks) == (2, 2, 2)
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    rows = [(parts[q].rows, parts[k].rows) for rank in range(4) if (parts := rank_parts(config, 4, rank, 2))]
    dim = own.attention().head_dim
    assert [part for part, _ in rows] == [range(2 * dim * rank, 2 * dim * (rank + 1)) for rank in range(4)]
    assert [part for _, part in rows] == [range(2 * dim)] * 2 + [range(2 * dim, 4 * dim)] * 2
    with pytest.raises(ConfigError, match=r"num_attention_heads 8 .*_size 6: sizes that can: 2, 4, 8$"):
        rank_config(config, 6, 2)
    with pytest.raises(ConfigError, match=r"num_attention_heads 9 .*_size 2: no size can, with decode_context_parallel_size 2$"):
        rank_config(read_config(raw_config("Llama", num_attention_heads=9, num_key_value_heads=3), "test"), 2, 2)


def test_programs_and_models_that_cannot_share_a_context_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = resolved(EngineConfig(tensor_parallel_size=2, decode_context_parallel_size=2), "cpu")
    model = describe(rank_config(read_config(raw_config("Llama"), "test"), 2, 2))
    with caplog.at_level(logging.INFO, "octavo"):
        assert not suited(asked, model).native
    assert "Native kernels are off for this model, torch computes: layer 0 has attention with context_parallel" in caplog.text
    assert suited(replace(asked, device="cuda"), model).enforce_eager
    specs = [LayerCacheSpec(layer, {"k": Buffer((2, 8), "float32")}, window) for layer, window in enumerate([None, 4])]
    needs = ModelNeeds(model, "float32", 0, specs, "float32", one_table=one_table(model, ONLY))
    with caplog.at_level(logging.INFO, "octavo"):
        Facts.tell_of_windows(SimpleNamespace(needs=needs))  # type: ignore[arg-type]
    assert needs.groups == one_group(specs)
    assert "Blocks behind windows are not freed: ranks that share a context share one block table per sequence" in caplog.text
    folder = tiny_model(tmp_path, "LlamaForCausalLM", seed=3)
    said = r"^decode_context_parallel_size is 2, and attention backend contiguous .*: set it to 1, or leave attention_backend at auto$"
    with pytest.raises(ConfigError, match=said):
        opened(folder, 2, 2, SIZE, attention_backend="contiguous", enable_prefix_caching=False)


# promise: octavo-verify
@pytest.mark.soak
@pytest.mark.parametrize(
    ("debug", "settings"), [("check=1", {"kv_cache_dtype": "int8"}), pytest.param("runner=device", {}, marks=pytest.mark.soak)]
)
def test_every_rank_proves_the_tokens_that_it_keeps(
    debug: str, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of both ranks are those of a schedule of one, and each compares its half of them."""
    folder = tiny_model(tmp_path, "LlamaForCausalLM", seed=3)
    monkeypatch.setenv("OCTAVO_DEBUG", debug)
    verified = proven(folder, 2, requests=LEAST_REQUESTS, block_size=SIZE, decode_context_parallel_size=2, **settings)
    alone = proven(folder, 1, requests=LEAST_REQUESTS, block_size=2 * SIZE, native=False, **settings)
    others = verified.other_ranks[1] - verified.compared.output_values
    assert verified.compared.cache_values + others == alone.compared.cache_values
    assert others > 100_000 and verified.compared.output_values > 10_000


SLIPPED = """
from octavo.step.step_tensors import HEAD
from octavo.worker.model_runner import ModelRunner
forward = ModelRunner.forward
def slipped(self, plan):
    if plan.step == 21:  # which writes no table anew
        table = self.table.words[plan.row[0], HEAD : self.table.layout.tokens]
        table[:] = table.roll(1)
    forward(self, plan)
ModelRunner.forward = slipped
"""


def test_a_wrong_block_of_one_rank_is_caught_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_ranks(SLIPPED, tmp_path, monkeypatch)
    folder = tiny_model(tmp_path / "model", "LlamaForCausalLM", seed=3)
    where = r"^rank 1: the caches differ: step 21, layer 0, row \d+, k of position (\d+) \(block \d+, offset (\d+)\)$"
    with pytest.raises(VerifyError, match=where) as error:
        proven(folder, 2, requests=LEAST_REQUESTS, block_size=SIZE, decode_context_parallel_size=2)
    found = re.search(where, str(error.value))
    assert found and [int(number) // SIZE % 2 for number in found.groups()] == [1, 1]  # a token that it keeps
