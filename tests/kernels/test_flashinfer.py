"""FlashInfer behind our protocol, with a stand-in for the package: whole engines, backend alone, and what is refused."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.attention.backend import AttentionBackend, load_backend
from octavo.attention.spec import AttentionSpec
from octavo.config import EngineConfig
from octavo.engine.verify import verify
from octavo.errors import ConfigError
from octavo.loading.resolve import load_model_config, resolve_model
from tests.kernels.test_attention import SPEC, lengths_around_a_block, naive, new_pool, run
from tests.support import flashinfer_stand_in
from tests.support.greedy import compare_with_reference
from tests.support.models import tiny_model

MODULE = "octavo.attention.flashinfer"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    return load_backend("flashinfer", "cuda")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5))


# promise: attention-backend-flashinfer
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, window=5), replace(SPEC, soft_cap=0.4)], ids=["plain", "window", "cap"])
@pytest.mark.parametrize("size", [1, 16])
def test_rows_of_every_kind_are_handed_over(size: int, spec: AttentionSpec, backend: type[AttentionBackend]) -> None:
    steps = lengths_around_a_block(size)
    found = run(backend, new_pool(size, torch.bfloat16), steps, spec)
    for ours, exact in zip(found, naive(steps, torch.bfloat16, spec.window, soft_cap=spec.soft_cap), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=3e-2, rtol=3e-2)


# promise: attention-backend-flashinfer
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_an_engine_generates_what_transformers_generates(folder: str, layout: str, backend: type[AttentionBackend]) -> None:
    from transformers import AutoModelForCausalLM

    """Steps padded to shapes, chunks, shared prefixes."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 15, 40, 40)]
    with LLM(
        folder, dtype="bfloat16", skip_tokenizer_init=True, num_gpu_blocks_override=60, max_num_seqs=8, max_num_batched_tokens=24,
        kv_cache_layout=layout, attention_backend="flashinfer",  # type: ignore[arg-type]
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[-1].num_cached_tokens > 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    compare_with_reference(outputs, model).accept()


# promise: attention-backend-flashinfer
def test_it_cannot_be_verified(folder: str, backend: type[AttentionBackend]) -> None:
    source = resolve_model(folder)
    with pytest.raises(ConfigError, match=r"flashinfer cannot be verified.*leave it at auto"):
        verify(EngineConfig(model=folder, dtype="bfloat16", attention_backend="flashinfer"), source, load_model_config(source), 1, 10)


# promise: attention-backend-flashinfer
def test_where_it_is_not_installed_that_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ConfigError, match=r"^attention_backend is flashinfer, which is not installed: pip install flashinfer-python$"):
        load_backend("flashinfer", "cuda")


@pytest.mark.gpu
def test_the_stand_in_takes_what_the_package_takes() -> None:
    flashinfer = pytest.importorskip("flashinfer")
    real, ours = (module.BatchPrefillWithPagedKVCacheWrapper for module in (flashinfer, flashinfer_stand_in))
    for name in ("__init__", "plan", "run"):
        known = inspect.signature(getattr(real, name)).parameters
        for parameter in inspect.signature(getattr(ours, name)).parameters.values():
            assert known[parameter.name].default == parameter.default, f"{name}({parameter.name})"
        by_place = [each.name for each in inspect.signature(getattr(ours, name)).parameters.values() if each.default is each.empty]
        assert list(known)[: len(by_place)] == by_place
