"""Everything at once: samples, penalties, logprobs, seeds, filters, stop ids, chunks, hits, preemption, aborts.

On a GPU graphs and single kernels must agree in every bit; on the twins, padded steps must say what the CPU's own runner says.
Requests come and go by the number of the step, so both engines plan the same steps.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.messages import AddRequest, TokenLogprobs
from octavo.policy import invariants
from tests.models.test_family import count_given_back
from tests.support.families import FAMILIES, family_model, for_a_gpu
from tests.support.mixtures import HEADS, tiny_mixture
from tests.support.places import Place, open_engine, random_model, vocabulary

ASKS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "n": 3, "seed": 7},
    {"temperature": 0.9, "top_k": 20, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 0.6, "repetition_penalty": 1.2, "prompt_logprobs": 2},
    {"temperature": 0, "logprobs": 5, "logit_bias": {5: 3.0}},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "n": 2},
    {"temperature": 0.9, "stop_token_ids": list(range(0, 300, 7))},
    {"temperature": 0.8, "allowed_token_ids": list(range(100)), "min_tokens": 4},
]  # fmt: skip
SIZE, ROWS, BATCHED = 16, 12, 64
BLOCKS, EVERY = 40, 3  # one comes every so many steps
ABORTED = 9  # of ten, the last, some steps after it came


@dataclass
class Heard:
    """All that was said of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends: list[object] = field(default_factory=list)


def requests(place: Place) -> list[AddRequest]:
    """On the twins each kind comes twice."""
    rng, vocab = Random(11), vocabulary(place)
    prefix = [rng.randrange(vocab) for _ in range(4 * SIZE)]
    made = []
    for number in range((4 if place == "cuda" else 2) * len(ASKS)):
        own = [rng.randrange(vocab) for _ in range(rng.choice([1, 5, SIZE - 1, SIZE, 40, 150]))]  # the longest take three steps
        shared = prefix[: rng.choice([0, 20, 3 * SIZE, 4 * SIZE])]
        params = SamplingParams(**ASKS[number % len(ASKS)], max_tokens=rng.randint(8, 60), ignore_eos=True, detokenize=False)
        made.append(AddRequest(str(number), shared + own, params))
    return made


def serve(llm: LLM, place: Place) -> dict[tuple[str, int], Heard]:
    core: Any = llm._core  # type: ignore[attr-defined]
    heard: dict[tuple[str, int], Heard] = defaultdict(Heard)
    waiting = requests(place)
    last = len(waiting) - 5
    while waiting or core.has_work:
        if waiting and core.scheduler.step % EVERY == 0:
            core.add(waiting.pop(0))
        late = last - len(waiting)
        news = core.abort(str(late)) if late >= 0 and late % len(ASKS) == ABORTED else []
        for delta in [*news, *core.step()]:
            one = heard[delta.request_id, delta.index]
            one.token_ids += delta.token_ids
            one.logprobs += delta.logprobs or []
            one.prompt_logprobs += delta.prompt_logprobs[1] if delta.prompt_logprobs else []
            if delta.finish_reason is not None:
                one.ends.append((delta.finish_reason, delta.stop_reason, delta.error))
    return heard


def assert_all_happened_and_nothing_is_held(llm: LLM, place: Place, heard: dict[tuple[str, int], Heard], windows: bool = False) -> None:
    scheduler: Any = llm._core.scheduler  # type: ignore[attr-defined]
    invariants.check(scheduler)
    pool, stats = scheduler.kv.pool, llm.stats()
    assert pool.num_free == pool.num_blocks - 1 and not any(pool.ref), "blocks are held though nothing runs"
    assert len(scheduler.rows.free) == ROWS and not scheduler.kv.pending
    reasons = {reason for one in heard.values() for reason, _, _ in one.ends}  # type: ignore[misc]
    assert reasons == {"length", "stop", "abort"} and all(len(one.ends) == 1 for one in heard.values())
    assert windows or (stats.preemptions > 0 and stats.prefix_hits > 0 and pool.counts.evicted > 0)  # windows leave blocks for all
    assert len(heard) == sum(request.params.n for request in requests(place))
    assert sum(len(one.logprobs) for one in heard.values()) > 100 and sum(len(one.prompt_logprobs) for one in heard.values()) > 100


def run(
    folder: Path, place: Place, dtype: Any, blocks: int = BLOCKS, windows: bool = False, **settings: Any
) -> dict[tuple[str, int], Heard]:
    """`windows`: whether layers free the blocks behind theirs"""
    with open_engine(
        folder, place, check=True, dtype=dtype, block_size=SIZE, num_gpu_blocks_override=blocks, max_model_len=20 * SIZE,
        max_num_seqs=ROWS, max_num_batched_tokens=BATCHED, pipeline_depth=2, **settings,
    ) as llm:  # fmt: skip
        given_back = count_given_back(llm._core.scheduler.kv)  # type: ignore[attr-defined]
        heard = serve(llm, place)
        assert (given_back[0] > 100) == windows
        assert_all_happened_and_nothing_is_held(llm, place, heard, windows)
        return heard


def numbers(logprobs: list[TokenLogprobs]) -> list[float]:
    return [number for each in logprobs for number in (each.logprob, *each.top_logprobs)]


def model_with_windows(folder: Path, name: str, place: Place) -> Path:
    """A model whose layers with a window have block tables of their own, and free the blocks behind it."""
    fields = {"vocab_size": vocabulary(place), "max_position_embeddings": 1024}
    if name == "gpt-oss":
        return tiny_mixture(folder, "GptOssForCausalLM", seed=3, **fields | ({"hidden_size": 16 * HEADS} if place == "cuda" else {}))
    tiny = FAMILIES[name] if place == "cpu" else for_a_gpu(FAMILIES[name])
    return family_model(folder, replace(tiny, options=tiny.options | fields), seed=15)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_their_kernels_one_by_one_say_the_same(dtype: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, "Qwen3ForCausalLM", "cuda")
    replayed, launched = (run(folder, "cuda", dtype, enforce_eager=eager) for eager in (False, True))
    assert replayed == launched


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "blocks"), [("gpt-oss", 60), ("gemma3", 50)])
def test_graphs_of_several_block_tables_say_what_their_kernels_say_one_by_one(name: str, blocks: int, tmp_path: Path) -> None:
    folder = model_with_windows(tmp_path / name, name, "cuda")
    replayed, launched = (run(folder, "cuda", "bfloat16", blocks, windows=True, enforce_eager=eager) for eager in (False, True))
    assert replayed == launched


# promise: gpu-computes-device
@pytest.mark.parametrize(("name", "blocks"), [("Qwen3ForCausalLM", BLOCKS), pytest.param("gpt-oss", 52, marks=pytest.mark.soak)])
def test_padded_steps_say_what_the_cpus_own_say(name: str, blocks: int, tmp_path: Path) -> None:
    windows = name == "gpt-oss"
    folder = model_with_windows(tmp_path / name, name, "cpu") if windows else random_model(tmp_path, name, "cpu")
    padded, plain = (run(folder, "cpu", "float32", blocks, windows, runner=runner) for runner in ("device", "model"))
    assert padded.keys() == plain.keys()
    for which, one in padded.items():
        other = plain[which]
        assert (one.token_ids, one.ends) == (other.token_ids, other.ends), which
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert [each.rank for each in mine] == [each.rank for each in theirs]
            assert numbers(mine) == pytest.approx(numbers(theirs), abs=1e-4)
