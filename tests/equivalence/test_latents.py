"""Models with latent attention, end to end: the tokens of transformers, whatever was computed before and beside them."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.errors import ConfigError, VerifyError
from tests.equivalence.test_hybrids import BOTH, GREEDY, STAGES, TENSOR, check_ranks, check_schedules, open_llm, prompts_of, second_turns
from tests.equivalence.test_schedules import difference, proof
from tests.equivalence.test_verify import run
from tests.support.families import family_model, reference_model
from tests.support.greedy import compare_with_reference, same_greedy_text
from tests.support.latents import LATENTS, for_a_gpu, long
from tests.support.latents_gguf import latent_gguf
from tests.support.places import PLACES, Place, open_engine
from tests.support.soaked import rarely

LENGTHS = (1, 17, 64, 65, 150)
EXPERTS = TENSOR | {"enable_expert_parallel": True}
OTHERS_IN_TORCH = rarely(("deepseek v2 lite", False), ("glm 4.7 flash", False))


# promise: family-folder
@pytest.mark.parametrize(
    ("name", "native"), [*product(LATENTS, (True,)), ("deepseek v2", False), ("deepseek v3", False), *OTHERS_IN_TORCH]
)
def test_latent_attention_gives_the_tokens_transformers_gives(name: str, native: bool, tmp_path: Path) -> None:
    """Prompts are computed in chunks beside other rows, and second turns continue from cached blocks."""
    folder = family_model(tmp_path / "model", LATENTS[name], seed=41)
    with open_llm(folder, native, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        first = llm.generate(prompts_of(LENGTHS), GREEDY, use_tqdm=False)
        second = llm.generate(second_turns(first), GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in second] == [(length + 7) // 16 * 16 for length in LENGTHS]
    compare_with_reference(first + second, reference_model(folder, LATENTS[name])).accept()


# promise: family-folder
@PLACES
@pytest.mark.parametrize("name", LATENTS)
def test_latent_attention_gives_them_on_a_gpu_too(name: str, place: Place, tmp_path: Path) -> None:
    """Steps are padded, and have rows of one token beside prompts; second turns continue from cached blocks."""
    tiny = LATENTS[name] if place == "cpu" else for_a_gpu(LATENTS[name])
    folder = family_model(tmp_path / "model", tiny, seed=48)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    with open_engine(folder, place, check=True, **settings) as llm:
        first = llm.generate(prompts_of((1, 17, 65, 90)), GREEDY, use_tqdm=False)
        second = llm.generate(second_turns(first), GREEDY, use_tqdm=False)
        assert llm.stats().prefix_hits > 0
    compare_with_reference(first + second, reference_model(folder, tiny)).accept()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek v2", {"quantization": "int8", "cpu_isa": "avx2"}),
        *rarely(("deepseek v3", {}), ("deepseek v2 lite", {"dtype": "bfloat16"}), ("glm 4.7 flash", {"cpu_isa": "portable"})),
    ],
)
def test_no_schedule_changes_a_bit_of_an_answer(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_model(tmp_path / "model", LATENTS[name], seed=42)
    check_schedules(folder, prompts_of((1, 40, 65, 150)), slice(1, 3), settings, monkeypatch)


# promise: octavo-verify
@pytest.mark.parametrize(
    ("name", "native", "block_size"),
    [("deepseek v3", True, 4), ("deepseek v2", False, 4), *rarely(*product(LATENTS, (True, False), (16,)))],
)
def test_paging_is_invisible_in_latent_attention(name: str, native: bool, block_size: int, tmp_path: Path) -> None:
    """Latents of every block are compared, and rows that share them read them together."""
    folder = str(family_model(tmp_path / "model", LATENTS[name], seed=43))
    try:
        verified = run(folder, requests=12, native=native, depth=1 + native, block_size=block_size)
    except VerifyError as error:  # which planted bugs must cause
        raise AssertionError(str(error)) from None
    assert verified.compared.cache_values > 50_000 and verified.compared.forks > 5
    assert verified.kernels.startswith("native ") == native


# promise: octavo-verify, gpu-computes-device
@PLACES
def test_paging_is_invisible_in_latents_of_a_device(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(family_model(tmp_path / "model", for_a_gpu(LATENTS["deepseek v3"]), seed=49))
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    verified = run(folder, requests=12, device=place, native=False, depth=2, block_size=4)
    assert verified.compared.cache_values > 50_000 and verified.compared.output_values > 50_000


# promise: octavo-verify-schedules
@pytest.mark.parametrize(
    ("name", "settings"),
    [("glm 4.7 flash", {"dtype": "bfloat16"}), *rarely(("deepseek v3", {}), ("deepseek v2", {"quantization": "int4"}))],
)
def test_several_pieces_of_latents_agree_under_every_schedule(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", long(LATENTS[name]), seed=44)
    assert difference(proof(str(folder), 700, 6, **settings)) is None


# promise: family-gguf
@pytest.mark.parametrize(("name", "old"), [("deepseek v2", False), ("deepseek v2 lite", True), *rarely(("glm 4.7 flash", False))])
def test_a_gguf_file_of_latent_attention_gives_the_text_of_its_folder(name: str, old: bool, tmp_path: Path) -> None:
    """A file has W_UK and W_UV in one tensor, or in two, of which the first is transposed."""
    folder, prompts, answers = family_model(tmp_path / "model", LATENTS[name], seed=47), prompts_of(LENGTHS), []
    for path in (folder, latent_gguf(folder, tmp_path / "model.gguf", old=old)):
        with open_llm(path, True) as llm:
            answers.append(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert all(map(same_greedy_text, *answers))


# -- ranks and stages


# promise: tensor-parallel-size, pipeline-parallel-size
@pytest.mark.parametrize(
    ("name", "native", "split"),
    [
        ("deepseek v3", True, TENSOR),
        *rarely(
            ("deepseek v2", False, TENSOR),
            ("deepseek v2", True, EXPERTS),
            ("deepseek v2 lite", False, STAGES),
            ("glm 4.7 flash", True, STAGES),
            ("deepseek v3", True, BOTH),
        ),
    ],
)
def test_ranks_and_stages_of_latent_attention_give_its_text(
    name: str, native: bool, split: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has some heads, and the latents of all tokens. Second turns continue from cached blocks, and rows are preempted."""
    check_ranks(family_model(tmp_path / "model", LATENTS[name], seed=45), native, split, prompts_of((1, 40, 65)), monkeypatch)


def test_a_context_of_latents_is_refused_before_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.host_ranks.ProcessPeer", None)
    folder = family_model(tmp_path / "model", LATENTS["deepseek v2"], seed=46)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size is 2, and the model has latent attention, .*: set it to 1"):
        LLM(str(folder), tensor_parallel_size=2, decode_context_parallel_size=2, skip_tokenizer_init=True)
