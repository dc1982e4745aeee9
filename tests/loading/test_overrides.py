"""`hf_overrides`: keys of a config.json with other values, for folders, GGUF files, plans and the identity of cached blocks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM
from octavo.cli.main import main
from octavo.config import Debug, EngineConfig
from octavo.engine.build import _identity
from octavo.errors import ConfigError, LoadError
from octavo.loading.resolve import load_model_config, source_of
from octavo.loading.shape import model_shape
from octavo.model_config import ModelConfig
from octavo.worker.facts import settle
from tests.loading.test_resolve import CONFIG, write_folder
from tests.support.models import stories260k

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 512}


def overridden(model: str, overrides: dict[str, Any] | None) -> ModelConfig:
    return load_model_config(source_of(EngineConfig(model=model, hf_overrides=overrides)))


# promise: hf-overrides
def test_values_replace_those_of_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {**CONFIG, "rope_theta": 5000.0, "max_position_embeddings": 512})
    config = overridden(folder, {"rope_scaling": YARN, "max_position_embeddings": 2048})
    rope = config.attention().rope
    assert (rope.kind, rope.factor, rope.theta, config.max_position) == ("yarn", 4.0, 5000.0, 2048)
    assert overridden(folder, None) == overridden(folder, {}) == load_model_config(source_of(EngineConfig(model=folder)))
    assert model_shape(folder, overrides={"max_position_embeddings": 64}).config.max_position == 64
    assert model_shape(f"{folder}/config.json", overrides={"vocab_size": 640}).config.vocab_size == 640


def test_both_names_of_a_rotation_mean_the_same(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {**CONFIG, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7000.0}})
    for name in ("rope_scaling", "rope_parameters"):
        rope = overridden(folder, {name: {**YARN, "rope_theta": 7000.0} if name == "rope_parameters" else YARN}).attention().rope
        assert (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 7000.0)


def test_a_gguf_file_is_overridden_under_the_names_of_a_config_json() -> None:
    assert overridden(None, {"rope_theta": 5.0}).attention().rope.theta == 5.0  # type: ignore[arg-type]


# promise: hf-overrides
def test_a_key_that_nobody_reads_is_refused_and_so_is_a_bad_value(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {**CONFIG, "of_the_maker": 1})
    with pytest.raises(ConfigError, match=r"hf_overrides has 'rope_thetas', which .*config.json does not have .*; did you mean rope_theta"):
        overridden(folder, {"rope_thetas": 5000.0})
    overridden(folder, {"of_the_maker": 2, "head_dim": 16})  # one that the file has, and one that the family reads
    with pytest.raises(LoadError, match=r"config.json with hf_overrides: vocab_size must be an integer"):
        overridden(folder, {"vocab_size": "many"})


def test_a_plan_counts_what_the_overrides_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path, CONFIG)
    for layers in (2, 7):
        assert main(["plan", "--json", f"{folder}/config.json", "--hf-overrides", f'{{"num_hidden_layers": {layers}}}']) == 0
        assert f'"num_layers": {layers}' in capsys.readouterr().out


@pytest.mark.parametrize(("architecture", "scaling"), [("Phi3ForCausalLM", LONGROPE), ("LlamaForCausalLM", YARN)])
def test_cached_blocks_belong_to_the_factors_of_their_rotation(architecture: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048, "pad_token_id": 0}
    raw = {**CONFIG, **sizes, "architectures": [architecture], "rope_scaling": scaling}
    config = EngineConfig(model=write_folder(tmp_path, raw), device="cpu", load_format="dummy")
    source = source_of(config)
    facts = settle(config, source, load_model_config(source), Debug())

    def identity(max_len: int) -> bytes:
        geometry: Any = SimpleNamespace(block_size=16, max_model_len=max_len)
        return _identity(facts, geometry, b"weights")

    assert identity(100) == identity(512) and identity(513) == identity(2048)
    assert (identity(512) != identity(513)) == (scaling is LONGROPE)


def test_cached_blocks_belong_to_their_overrides(tmp_path: Path) -> None:
    model = str(stories260k(tmp_path))
    settings: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_num_seqs": 2, "skip_tokenizer_init": True}
    found = {}
    for theta in (10000.0, 500.0):
        with LLM(model, hf_overrides={"rope_theta": theta}, **settings) as llm:
            text = llm.generate([[1, 403, 407, 261, 378]], use_tqdm=False)[0].outputs[0].token_ids
            found[theta] = llm._core.scheduler.kv.digests.identity, text  # type: ignore[attr-defined]
    assert found[10000.0][0] != found[500.0][0] and found[10000.0][1] != found[500.0][1]
