"""What a model's makers recommend is what it is sampled with, wherever the user has not said otherwise."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import LoadError
from octavo.loading.resolve import read_generation_config
from octavo.loading.text_side import open_text_side
from tests.cli.processes import octavo
from tests.support.story_folder import story_folder

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"
CHAT = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0.0, "max_new_tokens": 13, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = story_folder(tmp_path_factory.mktemp("recommended") / "stories")
    (folder / "generation_config.json").write_text(json.dumps(GREEDY))
    return folder


def opened(folder: Path, **settings: str) -> LLM:
    return LLM(str(folder), num_gpu_blocks_override=60, max_num_seqs=4, **settings)  # type: ignore[arg-type]


# promise: octavo-chat-llm
def test_they_fill_what_nobody_set(folder: Path) -> None:
    with opened(folder) as llm:
        wanted = SamplingParams(temperature=0, max_tokens=13, top_k=5, top_p=0.8, min_p=0.1, repetition_penalty=3.0)
        expected = llm.generate(PROMPT, wanted, use_tqdm=False)[0].outputs[0].token_ids
        assert len(expected) == 13
        assert llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert llm.chat(CHAT, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert [token for delta in llm.stream(PROMPT) for token in delta.token_ids] == expected
        assert [token for delta in llm.stream_chat(CHAT) for token in delta.token_ids] == expected
        assert llm.chat(CHAT, SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids == expected[:4]
        assert llm.chat(CHAT, replace(SamplingParams(), n=2), use_tqdm=False)[0].outputs[1].token_ids == expected
        plain = llm.generate(PROMPT, SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].token_ids
        assert len(plain) == 16 and plain[:13] != expected, "params given to generate are taken as they are"


# promise: octavo-chat-llm
def test_what_is_set_wins_even_where_it_equals_the_default(folder: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, repetition_penalty=1.0)
    filled = params.with_defaults({"temperature": 0.0, "max_tokens": 9, "repetition_penalty": 1.1, "top_k": 5})
    assert (filled.temperature, filled.max_tokens, filled.repetition_penalty, filled.top_k) == (1.0, 16, 1.0, 5)
    assert not filled.greedy and SamplingParams().with_defaults({"temperature": 0.0}).greedy


# promise: generation-config-none, values-taken-generation
def test_they_are_logged_once_and_none_turns_them_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"), opened(folder) as llm:
        assert llm.sampling_defaults["temperature"] == 0.0
    lines = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert len(lines) == 1 and "temperature=0.0" in lines[0] and "max_tokens=13" in lines[0]
    caplog.clear()
    with caplog.at_level(logging.INFO, "octavo"), opened(folder, generation_config="none") as llm:
        assert llm.sampling_defaults == {}
        assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) == 16
    assert not any("generation_config" in record.getMessage() for record in caplog.records)


# promise: generation-config, octavo-chat-llm
def test_the_commands_take_them_and_flags_win(folder: Path) -> None:
    blocks = ("--num-gpu-blocks-override", "60")
    with opened(folder) as llm:
        expected = llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].text
    assert octavo("generate", "--model", str(folder), *blocks, PROMPT).stdout.strip() == expected.strip()
    assert octavo("chat", str(folder), PROMPT, *blocks).stdout.strip() == expected.strip()
    off = octavo("generate", "--model", str(folder), *blocks, "--generation-config", "none", "--temperature", "0", PROMPT).stdout
    assert off.strip() and not off.startswith(expected)


def test_the_default_model_is_sampled_as_its_card_says_however_it_is_named() -> None:
    default = open_text_side(EngineConfig())
    by_path = open_text_side(EngineConfig(model=str(default.source.path)))  # as a further API process opens it
    for text in (default, by_path):
        assert text.is_default_model and text.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert open_text_side(EngineConfig(generation_config="none")).sampling_defaults == {}


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.7, "eos_token_id": 3}))
    found = read_generation_config(tmp_path)
    assert (found.end_ids, found.sampling) == ((3,), {"temperature": 0.0})


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": 1.5}, {"max_new_tokens": 0}, {"repetition_penalty": True}], ids=str
)
def test_a_recommendation_without_meaning_is_refused_with_file_and_field(tmp_path: Path, bad: dict[str, object]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(bad))
    name = {"max_new_tokens": "max_tokens"}.get(*bad, *bad)
    with pytest.raises(LoadError, match=rf"generation_config\.json: {name} must be"):
        read_generation_config(tmp_path)
