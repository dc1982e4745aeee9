"""Octavo and its peers on the CPU: what each runs, in which environment, from which files."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.peers.environments import environment
from bench.peers.export import hugging_face_folder, openvino_folder
from bench.peers.process import EngineProcess
from octavo.loading.resolve import ModelSource
from octavo.worker.machine import num_threads

HERE = Path(__file__).resolve().parent
MAX_MODEL_LEN = 2048  # the longest sequence of the CPU loads is shorter


@dataclass(frozen=True, slots=True)
class Engine:
    label: str
    weights: str
    python: Path
    script: str
    settings: dict[str, object]
    variables: dict[str, str] = field(default_factory=dict)

    def start(self) -> EngineProcess:
        settings = {"threads": num_threads(), **self.settings}
        return EngineProcess([str(self.python), str(HERE / self.script)], settings, self.variables)


def octavo(variant: str) -> Engine:
    root = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    label, weights, keywords = OCTAVO[variant]
    variables = {"PYTHONPATH": root, "OCTAVO_LOG_LEVEL": "WARNING"}
    return Engine(label, weights, Path(sys.executable), "run_octavo.py", {"engine": keywords}, variables)


OCTAVO: dict[str, tuple[str, str, dict[str, object]]] = {  # label, weights, keywords of LLM
    "packed": ("Octavo", "Q4_1, packed", {}),
    "int8-kv": ("Octavo, int8 KV", "Q4_1, packed", {"kv_cache_dtype": "int8"}),
    "bf16": ("Octavo", "bf16", {"quantization": "none", "dtype": "bfloat16"}),
}


def llama(source: ModelSource, root: Path, unified: bool = False, flash: bool = False) -> Engine:
    python = environment("llama", root)
    label = "llama.cpp" + ", unified KV" * unified + ", flash attention" * flash
    return Engine(label, "Q4_1", python, "run_llama.py", {"model": str(source.path), "unified": unified, "flash": flash})


def transformers(source: ModelSource, root: Path) -> Engine:
    python = environment("transformers", root)
    return Engine("transformers `generate`", "bf16", python, "run_transformers.py", {"model": str(_folder(source, root))})


def openvino(source: ModelSource, root: Path, weights: str = "int8") -> Engine:
    python = environment("openvino", root)
    folder = openvino_folder(_folder(source, root), root / "models" / f"openvino-{weights}", weights, python)
    return Engine("OpenVINO GenAI", weights, python, "run_openvino.py", {"model": str(folder)})


def vllm(source: ModelSource, root: Path) -> Engine:
    python = environment("vllm", root)
    cache = str(root / "vllm-cache")  # of compiled code: the first start fills it
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": cache, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings = {"model": str(_folder(source, root)), "max_model_len": MAX_MODEL_LEN}
    return Engine("vLLM CPU, compiled", "bf16", python, "run_vllm.py", settings, variables)


PEERS: dict[str, Callable[[ModelSource, Path], Engine]] = {
    "llama": llama,
    "llama-flash": partial(llama, flash=True),
    "llama-unified": partial(llama, unified=True),
    "transformers": transformers,
    "openvino": openvino,
    "openvino-fp16": partial(openvino, weights="fp16"),
    "vllm": vllm,
}


def _folder(source: ModelSource, root: Path) -> Path:
    return hugging_face_folder(source, root / "models" / "bf16")
