"""Start-up: the lines people grep for, what is refused before anything loads, and memory that comes back."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.messages import StepPlan
from octavo.worker.model_runner import ModelRunner
from tests.cli.processes import ROOT, SECONDS, environment

PROMPT = [1, 403, 407, 261, 378]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

# What `close` gives back to the allocator, `malloc_trim` gives back to the machine. A first model pays what stays for good.
OPEN_AND_CLOSE = """
import ctypes, json, sys, time
from octavo import LLM

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

with LLM(sys.argv[1], num_gpu_blocks_override=50) as llm:
    llm.generate("Once", use_tqdm=False)
before = resident()
print("the default model", file=sys.stderr, flush=True)
start = time.perf_counter()
llm = LLM()
seconds = time.perf_counter() - start
llm.generate("Hello", use_tqdm=False)
opened = resident()
llm.close()
print(json.dumps([before, opened, resident(), seconds]))
"""

LINES = [
    r"Reading the config took \d+\.\d\d seconds \(SmolLM2-135M-Instruct\)",
    r"Tokenizer loading took \d+\.\d\d seconds",
    r"Importing torch and the engine took \d+\.\d\d seconds",
    r"Device: cpu\b.*",
    r"Checking the native kernels took \d\.\d\d seconds \(\w+, threads: 1\)",
    r"Reserving the KV cache took \d+\.\d\d seconds",
    r"Model loading took \d+\.\d\d GiB and \d+\.\d\d seconds",
    r"Available KV cache memory: \d+\.\d\d GiB",
    r"KV cache size: [\d,]+ tokens \([\d,]+ blocks of 16\), maximum concurrency for 8,192 tokens per request: \d+\.\d\dx",
    r"Longest sequence: 8,192 tokens \(the model's own maximum is 8,192\)",
    r"Warm-up took \d+\.\d\d seconds",
    r"init engine took \d+\.\d\d seconds",
]


# promise: environment-octavo-log, one-start-line, without-max-model, logs-go-stderr, closing-llm-frees, every-phase-logged, nothing-over-2
# promise: model-loading-took, available-kv-cache, kv-cache-size, init-engine-took
@pytest.mark.timed("the phases of the start add up to its duration")
def test_the_default_model_logs_the_lines_people_grep_for_and_closing_gives_its_memory_back(stories: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", OPEN_AND_CLOSE, stories],
        cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    log = run.stderr.partition("the default model\n")[2]
    assert [line for line in log.splitlines() if not re.match(r"\d\d:\d\d:\d\d INFO ", line)] == []
    messages = [line.split(" ", 2)[2] for line in log.splitlines()]
    places = [next((at for at, message in enumerate(messages) if re.fullmatch(line, message)), None) for line in LINES]
    assert None not in places and places == sorted(places, key=lambda at: at or 0), messages
    tokens, blocks, times = re.findall(r"size: ([\d,]+) tokens \(([\d,]+) blocks.*: ([\d.]+)x", log)[0]
    assert int(tokens.replace(",", "")) == 16 * int(blocks.replace(",", ""))
    assert float(times) == pytest.approx(int(tokens.replace(",", "")) / 8192, abs=0.006)
    before, opened, closed, seconds = json.loads(run.stdout)
    phases = {name: float(spent) for name, spent in re.findall(r"INFO (.+) took (?:.+ and )?([\d.]+) seconds", log)}
    del phases["init engine"]  # a sum of others
    assert abs(seconds - sum(phases.values())) < 0.1 * seconds + 0.05, f"{seconds} seconds, of which the log tells {phases}"
    imports = re.findall(r"Importing torch and the engine took ([\d.]+) seconds", run.stderr)
    assert float(imports[0]) > 0.2 > float(imports[1])  # it happens once
    assert opened - before > 100, "the model is 135 million parameters, most of them of 4 bits"
    assert closed - before < 60, f"{before:.0f} MiB before, {opened:.0f} open, {closed:.0f} closed"


# promise: ready-means-warm
def test_the_engine_is_warm_when_it_is_ready_and_nothing_shows_it(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of step has run before the first request; blocks, rows, counts and texts are those of an engine that never did."""

    def opened() -> tuple[object, ...]:
        with LLM(stories, num_gpu_blocks_override=20, enable_prefix_caching=True) as llm:
            runner, scheduler = llm._core.executor, llm._core.scheduler
            null_block = [buffer[0].count_nonzero().item() for cache in runner.store.caches for buffer in cache.values()]  # type: ignore[attr-defined]
            rows = runner.table.words.count_nonzero().item()  # type: ignore[attr-defined]
            state = (null_block, rows, llm.stats(), scheduler.step, scheduler.kv.pool.counts, scheduler.kv.pool.num_free)
            texts = [output.outputs[0].text for output in llm.generate([PROMPT] * 3, SamplingParams(max_tokens=9))]
            return state, texts, null_block

    ran: list[tuple[list[int], list[int]]] = []
    forward = ModelRunner.forward

    def noted(self: ModelRunner, plan: StepPlan) -> None:
        ran.append((plan.start, plan.num_query))
        forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    warm = opened()
    assert ran[:2] == [([0], [2]), ([2], [1])]
    monkeypatch.setattr("octavo.worker.build._warm_up", lambda *_: None)
    assert opened() == warm
    state = warm[0]
    assert isinstance(state, tuple) and set(state[0]) == {0} == {state[1], state[3]}


# promise: ready-means-warm
@pytest.mark.parametrize(
    "settings",
    [{"max_model_len": 2}, {"block_size": 1}, {"block_size": 256}, {"max_num_seqs": 1},
     {"attention_backend": "contiguous", "enable_prefix_caching": False}],
    ids=str,
)  # fmt: skip
def test_the_warm_up_fits_every_shape_of_engine(settings: dict[str, Any], stories: str) -> None:
    with LLM(stories, num_gpu_blocks_override=20, **settings) as llm:
        assert len(llm.generate([PROMPT[:1]], SamplingParams(max_tokens=1, ignore_eos=True))[0].outputs[0].token_ids) == 1


# promise: octavo-debug-announced
def test_debug_switches_are_announced_in_the_first_log_line(
    stories: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "INFO")
    LLM(stories, num_gpu_blocks_override=20).close()
    assert caplog.records and not any("OCTAVO_DEBUG" in record.getMessage() for record in caplog.records)
    caplog.clear()
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1, preempt.every=3")
    LLM(stories, num_gpu_blocks_override=20).close()
    first = caplog.records[0]
    assert first.levelname == "WARNING"
    assert first.getMessage() == "OCTAVO_DEBUG is set, for tests only: check=True, preempt_every=3"


# promise: environment-octavo-log, environment-octavo-debug
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OCTAVO_DEBUG", "chekc=1", "OCTAVO_DEBUG has no switch 'chekc'; known: cache_force_miss, check"),
        ("OCTAVO_DEBUG", "runner=real", "runner must be one of model, fake, device, got 'real'"),
        ("OCTAVO_DEBUG", "preempt.every=often", "preempt_every must be a number, got 'often'"),
        ("OCTAVO_DEBUG", "forward.raise", "forward_raise must be a number, got ''"),
        ("OCTAVO_LOG_LEVEL", "loud", "OCTAVO_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got 'LOUD'"),
    ],
)
def test_a_switch_that_does_not_exist_is_refused(name: str, value: str, said: str, stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM(stories)


# promise: kv-cache-layout, attention-backend
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EngineConfig(attention_backend="contiguous"), "backend contiguous shares no blocks: set enable_prefix_caching=False"),
        (EngineConfig(kv_cache_layout="hnd"), "is hnd, and attention backend cpu has only nhd: leave kv_cache_layout at auto"),
        (EngineConfig(max_model_len=513), "--max-model-len is 513, but the model's own maximum is 512"),
        (EngineConfig(kv_cache_memory_bytes=100), "raise --kv-cache-memory-bytes to 40k or more"),
    ],
)
def test_what_does_not_go_together_is_refused_before_weights_load(config: EngineConfig, said: str, stories: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(stories) / name, tmp_path / name)  # no weights: loading them would be another error
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM.from_config(replace(config, model=str(tmp_path)))


# promise: load-format
def test_dummy_weights_need_only_a_config_and_follow_the_seed(stories: str, tmp_path: Path) -> None:
    shutil.copy(Path(stories) / "config.json", tmp_path / "config.json")

    def likelihood(seed: int) -> float | None:
        with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, seed=seed, num_gpu_blocks_override=20) as llm:
            return llm.generate(PROMPT, replace(GREEDY, logprobs=0))[0].outputs[0].cumulative_logprob

    assert likelihood(1) == likelihood(1) != likelihood(2)


# promise: dtype, llm-dtype-max
@pytest.mark.parametrize(("dtype", "element"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_a_float32_checkpoint_stays_float32_unless_told_otherwise(stories: str, dtype: str, element: int) -> None:
    with LLM(stories, dtype=dtype, num_gpu_blocks_override=20) as llm:  # type: ignore[arg-type]
        store = llm._core.executor.store  # type: ignore[attr-defined]
        assert {buffer.element_size() for cache in store.caches for buffer in cache.values()} == {element}
        assert {buffer.shape[:2] for cache in store.caches for buffer in cache.values()} == {(20, 16)}
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text.startswith(", there was a little girl")


# promise: without-max-model
def test_without_a_length_asked_for_it_is_the_longest_that_fits(stories: str) -> None:
    for blocks, longest in ((5, 65), (40, 512)):
        with LLM(stories, num_gpu_blocks_override=blocks) as llm:
            assert llm.max_model_len == longest


def test_rows_that_do_not_fit_memory_are_refused_with_the_numbers(stories: str) -> None:
    with pytest.raises(ConfigError, match=r"rows [\d,.]+ GiB, .* may use [\d.]+ GiB.*lower --max-num-seqs to \d+ or less"):
        LLM(stories, max_num_seqs=10**9, max_num_batched_tokens=10**9, num_gpu_blocks_override=50)
    with pytest.raises(ConfigError, match="without a tokenizer there is no chat"):
        LLM(stories, skip_tokenizer_init=True, chat_template="nope.jinja")
    with pytest.raises(ConfigError, match="model must be a path or a name, got 5"):
        LLM(5)  # type: ignore[arg-type]
