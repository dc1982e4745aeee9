"""Suggests what a wrong command, option or value was meant to be: the nearest name, or the name here of what other engines have.

The tables below hold the words of vLLM, SGLang, ollama and llama.cpp. Each word leads to the name it has here, or to a sentence
that says why there is no such thing. A name is suggested only where the command has it.
"""

from collections.abc import Collection, Mapping

from octavo.errors import nearest

COMMANDS = {
    "server": "serve",
    "start": "serve",
    "api-server": "serve",
    "llama-server": "serve",
    "llama-cli": "chat",
    "ask": "chat",
    "complete": "generate",
    "completion": "generate",
    "run-batch": "generate",
    "benchmark": "bench",
    "llama-bench": "bench",
    "ls": "list",
    "models": "list",
    "download": "pull",
    "get": "pull",
    "remove": "rm",
    "delete": "rm",
    "ps": "top",
    "show": "plan",
    "info": "plan",
    "collect-env": "doctor",
    "env": "doctor",
    "version": "--version",
    "help": "--help",
    "stop": "press Ctrl-C where `octavo serve` runs",
    "create": "a model is a folder, a .gguf file or owner/name on the hub; there are no model files to create",
    "cp": "a model is a folder, a .gguf file or owner/name on the hub; there are no model files to copy",
    "push": "Octavo only downloads models; `hf upload` sends them to the hub",
}

_ONE_ENGINE = "Octavo runs one engine, which --tensor-parallel-size and --pipeline-parallel-size can split"
_NO_LAYERS = "not needed: a GPU computes the whole model; --device chooses it"
_ALWAYS = "not needed: Octavo always does this"

_SAMPLING = "each request sets it; `octavo chat` and `octavo generate` have it as an option"

FLAGS = {
    **dict.fromkeys(("--temperature", "--top-p", "--top-k", "--min-p", "--max-tokens", "--stop"), _SAMPLING),
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--num-ctx": "--max-model-len",
    "--n-ctx": "--max-model-len",
    "--context-length": "--max-model-len",
    "--context-size": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "-m": "--model",
    "--model-path": "--model",
    "-hf": "--model",
    "--hf-repo": "--model",
    "--prompt": "write the prompt in quotes, without an option",
    "-p": "write the prompt in quotes, without an option",
    "-f": "--file",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--batch-size": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "-b": "--max-num-batched-tokens",
    "-ub": "--max-num-batched-tokens",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--allow-origins": "--allowed-origins",
    "--cors-allow-origins": "--allowed-origins",
    "--chat-template-file": "--chat-template",
    "--concurrency": "--max-num-seqs",
    "-y": "--yes",
    "--force": "--yes",
    "--threads": "set OMP_NUM_THREADS instead",
    "-t": "set OMP_NUM_THREADS instead",
    "--verbose": "set OCTAVO_LOG_LEVEL=DEBUG instead",
    "-v": "set OCTAVO_LOG_LEVEL=DEBUG instead",
    "-ngl": _NO_LAYERS,
    "--n-gpu-layers": _NO_LAYERS,
    "--gpu-layers": _NO_LAYERS,
    "--num-gpu": _NO_LAYERS,
    "--flash-attn": _ALWAYS,
    "-fa": _ALWAYS,
    "--jinja": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": "not needed: tool calls are read where the chat template has them",
    "--disable-log-requests": "not needed: requests are logged only with --enable-log-requests",
    "--trust-remote-code": "not needed: Octavo never runs code that comes with a model",
    "--tokenizer": "the tokenizer is the one that comes with the model",
    "--data-parallel-size": _ONE_ENGINE,
    "--tp-size": "--tensor-parallel-size",
    "--tensor-split": "--tensor-parallel-size",
}

VALUES = {
    "fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32", "f32": "float32",
    "gpu": "cuda", "cuda:0": "cuda", "nvidia": "cuda", "q8_0": "int8", "8bit": "int8", "q4_0": "int4", "4bit": "int4",
}  # fmt: skip


def meant(name: str, known: Collection[str], others: Mapping[str, str]) -> str:
    """Returns the end of a message about an unknown `name`: what it is called here, or what to do instead."""
    found = others.get(name)
    if found is None:
        return nearest(name, known)
    if found in known:
        return f"; did you mean {found}?"
    return meant(found, known, others) if found in others else "" if found.startswith("-") else f"; {found}"
