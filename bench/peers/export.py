"""The default model for peers that read no GGUF: a Hugging Face folder, its weights dequantised to bfloat16, and OpenVINO's form of it."""

import json
import subprocess
from pathlib import Path

from octavo.loading.gguf import config_dict
from octavo.loading.resolve import ModelSource, open_checkpoint
from octavo.text.gguf_tokenizer import build_gguf_tokenizer


class ExportFailed(Exception):
    """The converter failed; the message has its last words."""


def hugging_face_folder(source: ModelSource, folder: Path) -> Path:
    """Write it unless it is there; the last file written is the one that is looked for."""
    weights = folder / "model.safetensors"
    if not weights.exists():
        import torch
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = config_dict(source.gguf.metadata, source.gguf.tensors, source.name)
        _write(folder / "config.json", config | {"model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"})
        _write_tokenizer(source, folder)
        checkpoint = open_checkpoint(source)
        tensors = {name: checkpoint.read(name).to(torch.bfloat16).contiguous() for name in checkpoint.names()}
        unfinished = weights.with_suffix(".part")
        save_file(tensors, unfinished, {"format": "pt"})
        unfinished.rename(weights)
    return folder


def openvino_folder(hugging_face: Path, folder: Path, weights: str, python: Path) -> Path:
    """`weights`: fp16 or int8. The converter, optimum-intel, lives in the environment of `python`."""
    if not (folder / "openvino_model.xml").exists():
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(hugging_face)]
        done = subprocess.run(
            [*command, "--task", "text-generation-with-past", "--weight-format", weights, str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            raise ExportFailed(f"optimum-cli failed: {(done.stderr.splitlines() or ['it said nothing'])[-1]}")
    return folder


def _write_tokenizer(source: ModelSource, folder: Path) -> None:
    tokenizer = build_gguf_tokenizer(source.gguf.metadata, str(source.path))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_ids[0], "pad_token": tokenizer.eos_token_ids[0]}
    special = {name: tokenizer.backend.id_to_token(token_id) for name, token_id in names.items() if token_id is not None}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
