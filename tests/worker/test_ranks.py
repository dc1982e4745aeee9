"""A model that is split over real processes: the texts of one process, and what happens when one of them fails."""

import os
import signal
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from octavo import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.verify import Verified, verify
from octavo.errors import ConfigError, LoadError, RankLost
from octavo.loading.resolve import load_model_config, source_of
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan, StepResult
from octavo.outputs import RequestOutput
from octavo.worker.host_ranks import failed
from octavo.worker.rank_process import Failed, Forward, bodies, encode, masks_of, order, sample
from octavo.worker.ranks import RankedRunner, RowOwners
from tests.support.hand_made_grammar import hand_made, obeys, use_hand_made_grammars
from tests.support.models import tiny_model

VOCAB, SIZE = 320, 16
ASKS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"temperature": 0.8, "seed": 7, "n": 3},
    {"temperature": 0.9, "top_k": 5, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01, "presence_penalty": 0.5},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0.7, "structured_outputs": hand_made(3, 17)},
]


def opened(folder: Path, ranks: int, **settings: Any) -> LLM:
    limits: dict[str, Any] = {"block_size": SIZE, "num_gpu_blocks_override": 40, "max_num_seqs": 12, "max_num_batched_tokens": 64}
    return LLM(str(folder), tensor_parallel_size=ranks, skip_tokenizer_init=True, max_model_len=320, **(limits | settings))


def said(folder: Path, ranks: int, **settings: Any) -> tuple[list[RequestOutput], list[BeamSearchOutput], int]:
    """Returns the answers to all asks, those of beam searches, and how often a sequence was preempted."""
    rng = Random(11)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [shared * (number % 2) + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 15, 40, 90]))] for number in range(14)]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **ASKS[number % len(ASKS)]) for number in range(14)]
    with opened(folder, ranks, **settings) as llm:
        use_hand_made_grammars(llm, VOCAB)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts[:7], params[:7], use_tqdm=False)  # with what is cached
        searched = llm.beam_search(prompts[:6], BeamSearchParams(4, 24, length_penalty=0.7), use_tqdm=False)
        stats = llm.stats()
    assert stats.prefix_hits > 0
    return outputs, searched, stats.preemptions


# promise: tensor-parallel-size, llm-tensor-parallel-size, pipeline-parallel-size, llm-pipeline-parallel-size
@pytest.mark.parametrize(
    ("architecture", "shape", "ranks", "stages", "native"),
    [
        pytest.param("LlamaForCausalLM", {"heads": 4, "kv_heads": 2}, 2, 1, False, marks=pytest.mark.soak),
        pytest.param("Qwen2ForCausalLM", {"heads": 4, "kv_heads": 2, "tie": True}, 4, 1, True, marks=pytest.mark.soak),
        pytest.param("Qwen3ForCausalLM", {"heads": 6, "kv_heads": 3, "hidden": 96}, 3, 1, True, marks=pytest.mark.soak),
        pytest.param("Qwen3ForCausalLM", {"layers": 5}, 1, 3, True, marks=pytest.mark.soak),
        # both stages have the matrix of the vocabulary, and one table
        pytest.param("Qwen2ForCausalLM", {"tie": True, "window": 20}, 1, 2, False, marks=pytest.mark.soak),
        ("LlamaForCausalLM", {"heads": 4, "kv_heads": 2}, 2, 2, True),
        ("Qwen2ForCausalLM", {"heads": 2, "kv_heads": 1, "tie": True}, 2, 1, True),  # both ranks have the head of k and v
    ],
)
def test_ranks_say_together_what_one_says(
    architecture: str, shape: dict[str, Any], ranks: int, stages: int, native: bool, tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path, architecture, seed=3, **shape)
    mode = "processed" if stages == 2 else "raw"
    blocks = 48 if "window" in shape else 40  # alone, layers with a window have a table of their own
    alone, searched, preempted = said(folder, 1, native=native, logprobs_mode=mode, num_gpu_blocks_override=blocks)
    together, found, again = said(folder, ranks, native=native, logprobs_mode=mode, pipeline_parallel_size=stages)
    assert preempted > 0 and again > 0
    for search, search_together in zip(searched, found, strict=True):
        assert [answer.tokens for answer in search.sequences] == [answer.tokens for answer in search_together.sequences]
    for one, other in zip(alone, together, strict=True):
        assert one.num_cached_tokens == other.num_cached_tokens or stages > 1  # there, others may be admitted first
        for sample_alone, sample_together in zip(one.outputs, other.outputs, strict=True):
            assert sample_alone.token_ids == sample_together.token_ids
            for choices, others in zip(sample_alone.logprobs or [], sample_together.logprobs or [], strict=True):
                assert {token: found.logprob for token, found in choices.items()} == pytest.approx(
                    {token: found.logprob for token, found in others.items()}, abs=1e-4
                )
    guided = [sample.token_ids for number in range(6, 14, 7) for sample in together[number].outputs]
    assert guided and all(obeys(token_ids, 3, 17) for token_ids in guided)


def processes(llm: LLM) -> list[int]:
    executor: Any = llm._core.executor  # type: ignore[attr-defined]
    assert isinstance(executor, RankedRunner)
    return [peer.pid for peer in executor.ranks.peers]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path, "LlamaForCausalLM", seed=3)


LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)


KILLED, STOPPED = (signal.SIGKILL, "rank 1 was killed by signal 9"), (signal.SIGSTOP, "rank 1 was stopped")
SILENT = (signal.SIGSTOP, "rank 1 did not answer for 2 s")  # and nothing says that it was stopped


# promise: rank-lost
@pytest.mark.parametrize(
    ("number", "words", "stages"),
    [(*KILLED, 1), (*STOPPED, 1), (*SILENT, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((*KILLED, 2), (*SILENT, 1)))],
)
def test_a_rank_that_dies_or_stops_ends_the_engine_with_its_name(
    number: int, words: str, stages: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words == SILENT[1]:
        monkeypatch.setattr("octavo.worker.ranks.STEP_SECONDS", 2.0)
        monkeypatch.setattr("octavo.worker.host_ranks.is_stopped", lambda pid: False)
    llm = opened(folder, 2 // stages, pipeline_parallel_size=stages)
    (pid,) = processes(llm)
    llm.generate([[1, 2, 3]], LONG, use_tqdm=False)
    os.kill(pid, number)
    for _ in range(2):  # it does not come back
        with pytest.raises(RankLost, match=words if _ == 0 else "rank 1"):
            llm.generate([[1, 2, 3]], LONG, use_tqdm=False)
    llm.close()
    assert gone(pid)


def test_closing_ends_every_rank_and_gives_the_cpus_back(folder: Path) -> None:
    cpus = os.sched_getaffinity(0)
    llm = opened(folder, 2)
    pids = processes(llm)
    llm.close()
    assert all(gone(pid) for pid in pids)
    assert os.sched_getaffinity(0) == cpus


def test_a_rank_that_cannot_start_says_why_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds another file than the first rank did."""
    from octavo.worker import host_ranks

    started: list[int] = []
    first = host_ranks.ProcessPeer.__init__

    def tampered(self: Any, orders: Any, *hears: Callable[..., None]) -> None:
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        first(self, orders, *hears)
        started.append(self.pid)

    monkeypatch.setattr(host_ranks.ProcessPeer, "__init__", tampered)
    with pytest.raises(LoadError, match=r"rank 1: .* other weights than rank 0"):
        opened(folder, 2)
    assert started and all(gone(pid) for pid in started)


def test_a_size_that_does_not_fit_is_refused_before_a_process_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.host_ranks.ProcessPeer", None)
    cpus = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"num_attention_heads 4 .* tensor_parallel_size 3"):
        opened(folder, 3)
    assert os.sched_getaffinity(0) == cpus


def test_more_stages_than_layers_are_refused_before_a_process_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.host_ranks.ProcessPeer", None)
    with pytest.raises(ConfigError, match=r"2 layers cannot be divided among pipeline_parallel_size 3: set it to 2 or less"):
        opened(folder, 1, pipeline_parallel_size=3)


def test_a_token_that_comes_late_goes_to_the_row_that_its_sequence_has_by_then() -> None:
    def plan(step: int, rows: dict[int, int], forks: dict[int, int] | None = None, **entries: list[int]) -> StepPlan:
        noise = NoiseKey((0, 0), 0, 0)
        writes = [RowWrite(row, seq, array("i"), 0, 0, [], SamplingParams(), (), [], noise, b"") for row, seq in rows.items()]
        moved = [RowFork(row, 0, seq, noise) for row, seq in (forks or {}).items()]
        return StepPlan(step, row_writes=writes, row_forks=moved, **entries)  # type: ignore[arg-type]

    owners = RowOwners()
    first = plan(1, {0: 10, 1: 11, 2: 12}, row=[0, 1, 2], seq_id=[10, 11, 12], start=[0, 4, 7], num_query=[4, 1, 2])
    owners.apply(first)
    owners.apply(plan(2, {2: 20}, {0: 11, 1: 10}))  # two exchange rows, the third lost its own
    assert owners.sampled_tokens(first, StepResult(1, [[5], [6], [7]])) == [(1, 4, 5), (0, 5, 6)]
    assert owners.sampled_tokens(first, StepResult(1, [[], [6], []])) == [(0, 5, 6)]


def test_plans_and_masks_cross_a_pipe_as_they_are(tmp_path: Path) -> None:
    params, noise = SamplingParams(temperature=0.5, seed=3), NoiseKey((1, 2), 3, 4)
    write = RowWrite(0, 5, array("i", [1, 2, 3]), 2, 0, [[4]], params, (2,), [[1, 2]], noise, b"x")
    fork = RowFork(2, 0, 6, NoiseKey((9, 2), 3, 4))
    plan = StepPlan(
        7, [0], [5], [0], [3], outputs=[2], drafts={0: [4]}, new_blocks=[(0, 0, 0, 1)], copies=[(1, 2)], row_writes=[write],
        row_forks=[fork], lengths=[(1, 4)], last_ids=[(1, 9)], mask_rows=[0], group_lengths={1: [2]},
    )  # fmt: skip
    masks = np.arange(8, dtype=np.int32).reshape(2, 4)
    path = tmp_path / "pipe"
    path.write_bytes(encode(Forward(plan)) + encode(sample(masks)) + encode(sample(None)))
    with path.open("rb") as pipe:
        forward, masked, plain = map(order, bodies(pipe))
    assert isinstance(forward, Forward) and forward.plan == plan
    assert np.array_equal(masks_of(masked), masks) and masks_of(plain) is None  # type: ignore[arg-type]


def proven(folder: Path, ranks: int, stages: int = 1, requests: int = 24, **settings: Any) -> Verified:
    config = EngineConfig(model=str(folder), tensor_parallel_size=ranks, pipeline_parallel_size=stages, dtype="float32", **settings)
    source = source_of(config)
    return verify(config, source, load_model_config(source), depth=1, num_requests=requests)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.soak)])
def test_every_rank_proves_its_own_steps(ranks: int, stages: int, folder: Path) -> None:
    verified, alone = proven(folder, ranks, stages), proven(folder, 1)
    per_rank = verified.compared.values
    assert verified.other_ranks == {1: per_rank}
    assert stages > 1 or 2 * per_rank == alone.compared.values  # each has half of the heads
    assert failed(1, Failed("VerifyError", "the caches differ")).args == ("rank 1: the caches differ",)


GAP = 0.25  # between the logprobs of the best two, where texts of packed weights may go apart


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "stages"), [(3, 1), (1, 2)])
def test_packed_weights_are_as_sure_of_a_text_over_ranks(ranks: int, stages: int, record_property: Callable[[str, object], None]) -> None:
    """The default model: perplexity equal to 0.05 %, and greedy texts differ first where the best two are nearly as likely."""
    words = " ".join(Path("tests/data/prompts/questions.txt").read_text().splitlines())
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)

    def found(**sizes: int) -> tuple[float, list[Any]]:
        with LLM(max_model_len=1024, max_num_seqs=16, **sizes) as llm:
            ids = llm.get_tokenizer().encode(words)[:900]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            (scored,) = llm.generate([ids], params, use_tqdm=False)
            logprobs = [next(iter(place.values())).logprob for place in scored.prompt_logprobs or [] if place]
            asked = [words[start : start + 160] for start in range(0, 16 * 40, 40)]
            return float(np.exp(-np.mean(logprobs))), [output.outputs[0] for output in llm.generate(asked, greedy, use_tqdm=False)]

    (alone, texts), (split, others) = found(), found(tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    gaps = []
    for one, other in zip(texts, others, strict=True):
        apart = next((at for at, pair in enumerate(zip(one.token_ids, other.token_ids)) if pair[0] != pair[1]), None)
        if apart is not None:
            best, second = sorted((choice.logprob for choice in one.logprobs[apart].values()), reverse=True)[:2]
            gaps.append(best - second)
    told = f"{alone:.4f}, over ranks {split:.4f}; {len(gaps)} of 16 texts go apart, the largest gap there {max(gaps, default=0):.3f}"
    record_property("perplexity", told)
    assert split == pytest.approx(alone, rel=5e-4) and max(gaps, default=0) < GAP


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1)], ids=["tp2", "pp2", "tp2-pp2", "tp2-dcp2", "tp3"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_two_hundred_requests_say_what_one_rank_says(architecture: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """64 tokens each, in float32; texts may differ only where the best two are equal but for rounding."""
    shape: dict[str, Any] = {"heads": 6, "kv_heads": 3, "hidden": 96} if sizes[0] == 3 else {}
    folder, rng = tiny_model(tmp_path, architecture, seed=5, **shape), Random(2)
    shared = [rng.randrange(VOCAB) for _ in range(48)]
    prompts = [shared * (number % 2) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for number in range(200)]
    params = [
        SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False, **(ASKS[number % 5] | {"logprobs": 2})) for number in range(200)
    ]

    def texts(ranks: int, stages: int, shares: int) -> list[Any]:
        limits = {"num_gpu_blocks_override": 60, "max_num_seqs": 16, "block_size": SIZE // shares}
        split = {"pipeline_parallel_size": stages, "decode_context_parallel_size": shares}
        with opened(folder, ranks, **limits, **split) as llm:
            return [sample for output in llm.generate(prompts, params, use_tqdm=False) for sample in output.outputs]

    for one, other in zip(texts(1, 1, 1), texts(*sizes), strict=True):
        apart = next((at for at, pair in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if pair[0] != pair[1]), None)
        if apart is not None:
            best, second = sorted((choice.logprob for choice in one.logprobs[apart].values()), reverse=True)[:2]
            assert best - second < 1e-4, f"{one.token_ids[apart]} or {other.token_ids[apart]} at {apart}"
