"""The same request gives the same greedy text in float32, whatever happens around it, also on a GPU: there, too, the CPU's text."""

from typing import Any

import pytest
from torch import Tensor

from octavo import LLM, RequestOutput, SamplingParams
from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.worker import kv_store
from tests.support.greedy import same_greedy_text
from tests.support.models import tiny_model
from tests.support.soaked import rarely

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=4)
TARGETS = [list(range(3, 3 + length)) for length in (1, 15, 16, 17, 50)]
CROWD = [[(7 * number + position * number) % 300 for position in range(5 + 3 * number)] for number in range(31)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5))


def engine(folder: str, runner: str = "model", rows: int = 64, batched: int = 2048, blocks: int = 400, depth: int = 1) -> LLM:
    return LLM(
        folder, device="cuda" if runner == "gpu" else "cpu", dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=blocks,
        max_num_seqs=rows, max_num_batched_tokens=batched, pipeline_depth=depth,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(folder: str) -> list[RequestOutput]:
    """Each target by itself, with nothing cached."""
    outputs = []
    with engine(folder) as llm:
        for target in TARGETS:
            outputs += llm.generate([target], PARAMS, use_tqdm=False)
            llm.reset_prefix_cache()
    return outputs


@pytest.fixture(params=["model", "device", pytest.param("gpu", marks=pytest.mark.gpu)])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Also as on a GPU, where the kernels' twins compute: steps padded to shapes, rows on the device, sampled there. And on one."""
    monkeypatch.setenv("OCTAVO_DEBUG", switches(request.param))
    return str(request.param)


# On a CPU each runner has one of the depths with every change.
ON_CPU = [("model", 1), ("device", 2), *rarely(("model", 2), ("device", 1))]
ON_GPU = [pytest.param("gpu", depth, marks=pytest.mark.gpu) for depth in (1, 2)]
BOTH_DEPTHS = pytest.mark.parametrize(("runner", "depth"), [*ON_CPU, *ON_GPU], indirect=["runner"])


def switches(runner: str) -> str:
    return f"runner={'model' if runner == 'gpu' else runner}"


def agree(alone: list[RequestOutput], others: list[RequestOutput], runner: str) -> bool:
    """`alone` was computed natively: other native steps have the same bits, and torch and a GPU the same text but for near ties."""
    pairs = list(zip(alone, others, strict=True))
    if runner == "model":
        return all((one.outputs[0].token_ids, one.outputs[0].logprobs) == (other.outputs[0].token_ids, other.outputs[0].logprobs)
                   for one, other in pairs)  # fmt: skip
    return all(same_greedy_text(one, other) for one, other in pairs)


# promise: gpu-computes-device
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_among_32(folder: str, alone: list[RequestOutput], depth: int, runner: str) -> None:
    with engine(folder, runner, depth=depth) as llm:
        outputs = llm.generate([*CROWD[:16], *TARGETS, *CROWD[16:]], PARAMS, use_tqdm=False)
    assert agree(alone, outputs[16 : 16 + len(TARGETS)], runner)


@pytest.mark.soak
@pytest.mark.parametrize("depth", [1, 2])
def test_each_among_32(folder: str, alone: list[RequestOutput], depth: int, runner: str) -> None:
    with engine(folder, runner, depth=depth) as llm:
        for number, target in enumerate(TARGETS):
            outputs = llm.generate([*CROWD[:16], target, *CROWD[16:]], PARAMS, use_tqdm=False)
            assert agree([alone[number]], [outputs[16]], runner)


# promise: max-num-batched
@BOTH_DEPTHS
def test_chunked_at_16_tokens(folder: str, alone: list[RequestOutput], depth: int, runner: str) -> None:
    with engine(folder, runner, rows=8, batched=16, depth=depth) as llm:
        assert agree(alone, llm.generate(TARGETS, PARAMS, use_tqdm=False), runner)


@BOTH_DEPTHS
def test_after_a_prefix_hit(folder: str, alone: list[RequestOutput], depth: int, runner: str) -> None:
    with engine(folder, runner, depth=depth) as llm:
        llm.generate(TARGETS, PARAMS, use_tqdm=False)
        again = llm.generate(TARGETS, PARAMS, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [0, 0, 0, 16, 48]
    assert agree(alone, again, runner)


# promise: life-record-per
@BOTH_DEPTHS
def test_preempted_every_3_steps(
    folder: str, alone: list[RequestOutput], depth: int, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", f"{switches(runner)},check=1,preempt.every=3")
    with engine(folder, runner, depth=depth) as llm:
        outputs = llm.generate(TARGETS, PARAMS, use_tqdm=False)
    assert sum(output.metrics.preemptions for output in outputs) > 10
    assert sum(output.metrics.recomputed_tokens for output in outputs) > 0
    assert agree(alone, outputs, runner)


def test_in_a_pool_too_small_for_all(folder: str, alone: list[RequestOutput], runner: str) -> None:
    with engine(folder, runner, blocks=9) as llm:
        outputs = llm.generate(TARGETS, PARAMS, use_tqdm=False)
        assert llm.stats().preemptions > 0
    assert agree(alone, outputs, runner)


# promise: attention-backend
def test_without_blocks_at_all(folder: str, alone: list[RequestOutput]) -> None:
    with LLM(  # with not a row to spare
        folder, device="cpu", dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=400, max_num_seqs=len(TARGETS),
        attention_backend="contiguous", enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        assert agree(alone, llm.generate(TARGETS, PARAMS, use_tqdm=False), "torch")


# promise: kv-cache-layout
def test_a_caches_layout_does_not_show_in_any_bit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes shared, samples forked by copies of blocks, rows preempted, in few blocks."""
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device,check=1,preempt.every=5")
    params = SamplingParams(temperature=0.8, n=3, seed=7, max_tokens=20, ignore_eos=True, logprobs=4)
    told, layouts = [], set()

    def noted(layout: Layout, *given: Any) -> Tensor:
        layouts.add(layout)
        return empty_cache(layout, *given)

    monkeypatch.setattr(kv_store, "empty_cache", noted)
    for layout in ("nhd", "hnd"):
        with LLM(
            folder, dtype="bfloat16", skip_tokenizer_init=True, num_gpu_blocks_override=60, max_num_seqs=8, block_size=4,
            kv_cache_layout=layout,  # type: ignore[arg-type]
        ) as llm:  # fmt: skip
            outputs = llm.generate([*TARGETS, TARGETS[4]], params, use_tqdm=False)
            assert llm.stats().preemptions > 0 and outputs[-1].num_cached_tokens > 0
            told.append([(sample.token_ids, sample.logprobs) for output in outputs for sample in output.outputs])
    assert told[0] == told[1] and layouts == {"nhd", "hnd"}


# promise: samplingparams-seed
def test_samples_of_one_seed_do_not_depend_on_the_batch(folder: str, runner: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, n=3, seed=11, max_tokens=24, ignore_eos=True)
    with engine(folder, runner) as llm:
        (one,) = llm.generate([TARGETS[4]], params, use_tqdm=False)
        crowd = llm.generate([*CROWD, TARGETS[4]], params, use_tqdm=False)[-1]
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in crowd.outputs]
        assert len({tuple(sample.token_ids) for sample in one.outputs}) == 3
