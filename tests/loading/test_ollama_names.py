"""Names of ollama's library, and what to write instead."""

import pytest

from octavo.loading.names import is_default_name, parse_hub_name
from octavo.loading.ollama_names import ON_HUB, meant_on_hub


# promise: ollama-names
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
        ("qwen3", "Qwen/Qwen3-8B"),
        ("qwen3:latest", "Qwen/Qwen3-8B"),
        ("Llama3.2:1B-instruct-q4_K_M", "meta-llama/Llama-3.2-1B-Instruct"),
        ("library/mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("mixtral:8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
        ("phi3:mini", "microsoft/Phi-3-mini-128k-instruct"),
        ("smollm2:135m", "SmolLM2-135M-Instruct"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen", None),
        ("qwen3:9b", None),
        ("deepseek-r1:671b", None),
        ("hello", None),
        ("", None),
        (":", None),
        ("Qwen/Qwen3-0.6B", None),
    ],
)
def test_a_name_of_ollama_or_of_the_web_has_one_on_the_hub(name: str, meant: str | None) -> None:
    assert meant_on_hub(name) == meant


def test_every_suggestion_is_a_name_that_octavo_takes() -> None:
    assert all(parse_hub_name(name) or is_default_name(name) for name in ON_HUB.values())
    assert all(meant_on_hub(name) == repository for name, repository in ON_HUB.items())
