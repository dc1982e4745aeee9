"""Names of ollama's library, and the repositories of the Hugging Face hub that have the same models.

    qwen3:0.6b        family and size
    qwen3             the size that ollama takes without one, which comes first below
    qwen3:0.6b-q8_0   the rest of a tag, such as its quantisation, does not choose the repository

Only families that Octavo opens are listed. The repositories are those of the models' makers.
"""

import re

from octavo.loading.names import NAME, parse_hub_name

ON_HUB = {
    "codellama:7b": "codellama/CodeLlama-7b-Instruct-hf",
    "codellama:13b": "codellama/CodeLlama-13b-Instruct-hf",
    "codellama:34b": "codellama/CodeLlama-34b-Instruct-hf",
    "deepseek-r1:8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-r1:1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-r1:7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-r1:14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "deepseek-r1:32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-r1:70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "gemma2:9b": "google/gemma-2-9b-it",
    "gemma2:2b": "google/gemma-2-2b-it",
    "gemma2:27b": "google/gemma-2-27b-it",
    "gemma3:4b": "google/gemma-3-4b-it",
    "gemma3:270m": "google/gemma-3-270m-it",
    "gemma3:1b": "google/gemma-3-1b-it",
    "gemma3:12b": "google/gemma-3-12b-it",
    "gemma3:27b": "google/gemma-3-27b-it",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "gpt-oss:120b": "openai/gpt-oss-120b",
    "granite3-dense:2b": "ibm-granite/granite-3.0-2b-instruct",
    "granite3-dense:8b": "ibm-granite/granite-3.0-8b-instruct",
    "granite3.1-dense:8b": "ibm-granite/granite-3.1-8b-instruct",
    "granite3.1-dense:2b": "ibm-granite/granite-3.1-2b-instruct",
    "granite3.2:8b": "ibm-granite/granite-3.2-8b-instruct",
    "granite3.2:2b": "ibm-granite/granite-3.2-2b-instruct",
    "granite3.3:8b": "ibm-granite/granite-3.3-8b-instruct",
    "granite3.3:2b": "ibm-granite/granite-3.3-2b-instruct",
    "llama2:7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama2:13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama2:70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama3:8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3:70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1:70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3.1:405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.3:70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo:12b": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-small:24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistral-small:22b": "mistralai/Mistral-Small-Instruct-2409",
    "mixtral:8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral:8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "olmo2:7b": "allenai/OLMo-2-1124-7B-Instruct",
    "olmo2:13b": "allenai/OLMo-2-1124-13B-Instruct",
    "phi3:3.8b": "microsoft/Phi-3-mini-128k-instruct",
    "phi3:mini": "microsoft/Phi-3-mini-128k-instruct",
    "phi3:14b": "microsoft/Phi-3-medium-128k-instruct",
    "phi3:medium": "microsoft/Phi-3-medium-128k-instruct",
    "phi3.5:3.8b": "microsoft/Phi-3.5-mini-instruct",
    "phi4:14b": "microsoft/phi-4",
    "phi4-mini:3.8b": "microsoft/Phi-4-mini-instruct",
    "qwen2:7b": "Qwen/Qwen2-7B-Instruct",
    "qwen2:0.5b": "Qwen/Qwen2-0.5B-Instruct",
    "qwen2:1.5b": "Qwen/Qwen2-1.5B-Instruct",
    "qwen2:72b": "Qwen/Qwen2-72B-Instruct",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5:14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5:32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5:72b": "Qwen/Qwen2.5-72B-Instruct",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "qwen2.5-coder:0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder:1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "qwen2.5-coder:3b": "Qwen/Qwen2.5-Coder-3B-Instruct",
    "qwen2.5-coder:14b": "Qwen/Qwen2.5-Coder-14B-Instruct",
    "qwen2.5-coder:32b": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B",
    "qwen3:14b": "Qwen/Qwen3-14B",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B",
    "qwen3:32b": "Qwen/Qwen3-32B",
    "qwen3:235b": "Qwen/Qwen3-235B-A22B",
    "qwen3-coder:30b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "qwen3-coder:480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "qwq:32b": "Qwen/QwQ-32B",
    "smollm:1.7b": "HuggingFaceTB/SmolLM-1.7B-Instruct",
    "smollm:135m": "HuggingFaceTB/SmolLM-135M-Instruct",
    "smollm:360m": "HuggingFaceTB/SmolLM-360M-Instruct",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2:135m": NAME,
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "tinyllama:1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
_WITHOUT_OWNER = {repository.rpartition("/")[2].lower(): repository for repository in ON_HUB.values()}  # qwen3-0.6b -> Qwen/Qwen3-0.6B
_WEB = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/")


def meant_on_hub(text: str) -> str | None:
    """Returns what to write instead of a name of ollama's library, a hub name without its owner, or an address of the hub.

    Returns None if `text` is none of these.
    """
    if address := _WEB.match(text):
        name = text[address.end() :].rstrip("/")
        return name if parse_hub_name(name) else None
    name = text.lower().removeprefix("library/")
    family, _, tag = name.partition(":")
    if tag in ("", "latest"):
        first = (repository for known, repository in ON_HUB.items() if known.partition(":")[0] == family)
        return next(first, _WITHOUT_OWNER.get(name))
    return ON_HUB.get(f"{family}:{tag.partition('-')[0]}")
