"""Names of vLLM that Octavo does not have are answered with what to use instead, wherever they are used."""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import LLM, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams, StructuredOutputsParams, vllm_names
from octavo.inputs import TokensPrompt, prompt_parts

DOCS = Path(octavo.__file__).parents[1] / "docs"
METHODS: list[Callable[..., object]] = [LLM.generate, LLM.chat, LLM.beam_search, AsyncLLM.generate]


def names_of(cls: Any) -> set[str]:
    return {each.name for each in fields(cls)}


# Each table, and the names that are there in its place.
TABLES: list[tuple[Mapping[str, str], set[str]]] = [
    (vllm_names.SETTINGS, names_of(EngineArgs)),
    (vllm_names.ARGUMENTS, {name for method in METHODS for name in inspect.signature(method).parameters} - {"params"}),
    (vllm_names.SAMPLING, names_of(SamplingParams)),
    (vllm_names.FORM_FIELDS, names_of(StructuredOutputsParams)),
    (vllm_names.PROMPT_FIELDS, set(TokensPrompt.__annotations__)),
    (vllm_names.IMPORTS, set(octavo.__all__)),
    (vllm_names.ATTRIBUTES, {*vars(LLM), *vars(AsyncLLM)}),
]


# promise: vllm-names
def test_the_guide_says_what_the_errors_say_and_none_of_the_names_exists() -> None:
    guide = (DOCS / "from-vllm.md").read_text().partition("**Not there.**")[2]
    for table, existing in TABLES:
        assert not table.keys() & existing, "built now: remove it from the table"
        missing = [name for name, instead in table.items() if not re.search(rf"^\| .*`{name}`.* \| {re.escape(instead)} \|$", guide, re.M)]
        assert missing == []


# promise: vllm-names
@pytest.mark.parametrize("name", vllm_names.IMPORTS)
def test_an_import_says_what_to_use_instead(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(f"from octavo import LLM, {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="^" + re.escape(f"octavo has no {name}: {vllm_names.IMPORTS[name]}")):
        importlib.import_module("program")


# promise: vllm-names, unknown-keyword-typeerror
def test_a_keyword_or_method_says_what_to_use_instead() -> None:
    llm, engine = object.__new__(LLM), object.__new__(AsyncLLM)
    uses: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: LLM(speculative_config={}), TypeError, "LLM has no setting 'speculative_config': there is no speculative decoding"),
        (lambda: LLM(enable_lora=True), TypeError, "LLM has no setting 'enable_lora': .* merge the adapter"),
        (lambda: EngineArgs(trust_remote_code=True), TypeError, "no field 'trust_remote_code': code of a model is never run"),
        (lambda: SamplingParams(guided_decoding=1), TypeError, "no field 'guided_decoding': use structured_outputs="),
        (lambda: BeamSearchParams(2, 3, best_of=4), TypeError, "no field 'best_of': use n"),
        (lambda: StructuredOutputsParams(regex="a", backend="xgrammar"), TypeError, "no field 'backend': .* llguidance"),
        (lambda: SamplingParams(structured_outputs={"regex": "a", "whitespace_pattern": " "}), ValueError, "'whitespace_pattern': white"),
        (lambda: llm.generate("a", lora_request=1), TypeError, "generate has no argument 'lora_request': there are no LoRA"),
        (lambda: llm.generate("a", params=SamplingParams()), TypeError, "generate has no argument 'params': it is called sampling_params"),
        (lambda: llm.chat([], chat_template_content_format="openai"), TypeError, "chat has no argument 'chat_template_content_format': "),
        (lambda: llm.chat([], tols=[]), TypeError, "chat has no argument 'tols'; did you mean tools?"),
        (lambda: llm.beam_search("a", None, concurrency_limit=1), TypeError, "beam_search has no .* max_num_seqs"),
        (lambda: llm.encode("a"), AttributeError, "LLM has no attribute 'encode': Octavo generates text"),
        (lambda: engine.add_lora("a"), AttributeError, "AsyncLLM has no attribute 'add_lora': there are no LoRA adapters"),
        (lambda: llm.chats, AttributeError, "LLM has no attribute 'chats'$"),
        (lambda: prompt_parts({"prompt_embeds": 1}), ValueError, "a prompt has no field 'prompt_embeds': give text or token ids"),
    ]  # type: ignore[attr-defined, call-arg, unused-ignore]
    for use, kind, said in uses:
        with pytest.raises(kind, match=said):
            use()


def test_a_name_of_vllm_that_asks_for_nothing_is_accepted_and_others_are_not() -> None:
    vllm_names.refuse_arguments(LLM.generate, {"lora_request": None})
    with pytest.raises(TypeError, match="generate has no argument 'lora'"):
        vllm_names.refuse_arguments(LLM.generate, {"lora": None})


def test_help_shows_the_fields_of_classes_whose_names_are_explained() -> None:
    for cls in (SamplingParams, BeamSearchParams, StructuredOutputsParams, EngineArgs):
        assert list(inspect.signature(cls).parameters) == [each.name for each in fields(cls) if each.init]
