"""A Qwen3 folder as AutoAWQ writes it (version GEMM), against transformers with its dequantised weights.

Quantising, packing and dequantising are written here from AutoAWQ's definition, apart from what reads them:

    scale = (largest - least) / 15 of a group        zero = -round(least / scale)        q = round(w / scale) + zero, 0 to 15
    qweight int32 [in, out / 8]: the nibbles of a word, lowest first, are the columns 0 2 4 6 1 3 5 7 of its eight
    qzeros  int32 [in / group, out / 8]: packed likewise        scales float16 [in / group, out]        w = (q - zero) * scale
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, RequestOutput, SamplingParams
from tests.support.greedy import compare_with_reference
from tests.support.models import tiny_model
from tests.support.rounding import assert_near, share_of_int8

GROUP = 32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PROMPTS = [[(11 * i + 5 * j + j * j) % 300 for j in range(4 + 23 * i)] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def packed(numbers: Tensor) -> Tensor:
    """[rows, columns] from 0 to 15 -> int32 [rows, columns / 8]"""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(ORDER):
        words |= numbers[:, column::8].long() << 4 * place
    return words.to(torch.int32)


def quantised(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(what AutoAWQ stores of a weight [out, in], the weight that it stands for)"""
    out, size = weight.shape
    groups = weight.view(out, size // GROUP, GROUP)
    least, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((largest - least).clamp(min=1e-5) / 15).half().float()
    zeros = (-torch.round(least / scales)).clamp(0, 15)
    numbers = (torch.round(groups / scales) + zeros).clamp(0, 15)
    stored = {
        "qweight": packed(numbers.view(out, size).T),
        "qzeros": packed(zeros.squeeze(-1).T),
        "scales": scales.squeeze(-1).T.half().contiguous(),
    }
    return stored, ((numbers - zeros) * scales).view(out, size)


def as_autoawq(source: Path, folder: Path, not_converted: list[str] | None) -> dict[str, Tensor]:
    """Writes `source` as AutoAWQ does; returns the weights that this stands for, in float32."""
    stored, dequantised = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight") and not any(part in name for part in not_converted or ()):
            parts, dequantised[name] = quantised(weight)
            stored |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
        else:
            stored[name] = weight.half()
            dequantised[name] = weight.half().float()
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    awq = {"bits": 4, "group_size": GROUP, "quant_method": "awq", "version": "gemm", "zero_point": True}
    config |= {"dtype": "float16", "quantization_config": awq | {"modules_to_not_convert": not_converted}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return dequantised


def run(folder: Path, native: bool) -> list[RequestOutput]:
    with LLM(str(folder), dtype="float32", native=native, skip_tokenizer_init=True, num_gpu_blocks_override=60, max_num_seqs=4) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


# promise: model-folder-quantised
@pytest.mark.parametrize(("tie", "not_converted"), [(True, None), (False, ["self_attn.o_proj"])], ids=["tied", "untied"])
def test_logits_are_those_of_the_dequantised_weights(
    tie: bool, not_converted: list[str] | None, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_model(tmp_path / "floats", "Qwen3ForCausalLM", seed=5, tie=tie)
    weights = as_autoawq(source, tmp_path / "awq", not_converted)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.tie_weights()
    exact = run(tmp_path / "awq", native=False)
    compared = compare_with_reference(exact, model)
    assert compared.tokens == 48
    compared.accept()
    record_property("native", assert_near(run(tmp_path / "awq", native=True), exact, share_of_int8(GROUP), layers=2))
