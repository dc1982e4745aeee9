"""Models with recurrent layers against transformers in float32, in steps made by hand that name the slots of states."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import LoadError
from octavo.kernels.reference.dequant import dequantize
from octavo.loading.shape import model_shape
from octavo.models.decoder import Decoder
from octavo.quant.fp8 import folded
from octavo.step.step_tensors import NO_STATE
from tests.support.families import VOCAB, Tiny, family_model, reference_model
from tests.support.hybrids import HYBRIDS, Row, Steps, delta_heads, load, opened, with_images
from tests.support.hybrids_gguf import hybrid_gguf
from tests.support.soaked import rarely

LENGTHS = (1, 3, 4, 63, 64, 65)
NEAR = 1e-3  # logits of a standard deviation of 2
CLOSE = 2e-4  # the same sums in another order, through four layers


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def references(folder: Path, tiny: Tiny, prompts: list[list[int]]) -> list[Tensor]:
    model = reference_model(folder, tiny)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]


def whole(model: Decoder, ids: list[int]) -> Tensor:
    """The logits of a prompt that one step computes."""
    return Steps(model).run(Row(0, ids, read=0, write=1))[0]


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape and theirs.std() > 0.5
    assert (ours - theirs).abs().max() < tolerance, (ours - theirs).abs().max()


# promise: family-folder
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = HYBRIDS[name]
    folder = family_model(tmp_path / "model", tiny, seed=21)
    model, prompts = load(folder), [prompt(length, length) for length in LENGTHS]
    for ids, theirs in zip(prompts, references(folder, tiny, prompts), strict=True):
        assert_near(whole(model, ids), theirs, NEAR)


def test_a_prompt_of_a_thousand_tokens_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    tiny, ids = HYBRIDS["qwen3.5"], prompt(1000)
    tiny = replace(tiny, options=tiny.options | delta_heads(4, 4, 16, 256) | {"max_position_embeddings": 1024})
    folder = family_model(tmp_path / "model", tiny, seed=27)
    assert_near(Steps(load(folder), max_len=1024).run(Row(0, ids, 0, 1))[0], references(folder, tiny, [ids])[0], NEAR)


@pytest.mark.parametrize("name", ["qwen3.5 moe", *rarely("qwen3.5")])
def test_the_text_part_of_a_hybrid_with_images_is_found_under_its_prefixes(name: str, tmp_path: Path) -> None:
    """Weights of images, and of layers that predict further tokens, are left out. On the hub, experts are in one tensor."""
    tiny, ids = with_images(tmp_path / "model", HYBRIDS[name], seed=22), prompt(9)
    ours = whole(load(tmp_path / "model"), ids)
    assert_near(ours, references(tmp_path / "model", tiny, [ids])[0], NEAR)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(stacked(weights), tmp_path / "model" / "model.safetensors")
    assert torch.equal(whole(load(tmp_path / "model"), ids), ours)


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of a layer as one tensor [experts, rows, columns] for gate and up, and one for down."""
    others = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for base in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        experts = range(sum(name.startswith(f"{base}.experts.") for name in weights) // 3)
        gate, up, down = (
            torch.stack([weights[f"{base}.experts.{expert}.{part}_proj.weight"] for expert in experts]) for part in ("gate", "up", "down")
        )
        others |= {f"{base}.experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{base}.experts.down_proj": down}
    return others


# -- steps


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3-next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(family_model(tmp_path_factory.mktemp("hybrid") / "model", HYBRIDS[request.param], seed=23))


@pytest.mark.parametrize("chunks", [(1,) * 9, (2, 1, 1, 30, 3), (3, 3, 31), (36, 1)])
def test_chunks_hand_their_states_on(model: Decoder, chunks: tuple[int, ...]) -> None:
    ids, steps, logits, slot = prompt(sum(chunks)), Steps(model), [], 0
    for number, size in enumerate(chunks):
        start, write = sum(chunks[:number]), 1 + number % 2
        logits += steps.run(Row(0, ids[start : start + size], read=slot, write=write))
        slot = write
    assert_near(torch.cat(logits), whole(model, ids), CLOSE)


def test_rows_of_a_step_do_not_see_each_other(model: Decoder) -> None:
    texts, steps = [prompt(40, seed) for seed in range(3)], Steps(model)
    alone = [whole(model, ids) for ids in texts]
    first = steps.run(Row(2, texts[0][:5], 0, 3), Row(0, texts[1][:1], 0, 1), Row(1, texts[2][:7], 0, 2))
    second = steps.run(Row(1, texts[2][7:8], 2, 5), Row(2, texts[0][5:], 3, 6), Row(0, texts[1][1:3], 1, 4))
    third = steps.run(Row(0, texts[1][3:], 4, 1), Row(1, texts[2][8:], 5, 2), sampled=True)
    assert_near(torch.cat([first[0], second[1]]), alone[0], CLOSE)
    assert_near(torch.cat([first[1], second[2], third[0]]), torch.cat([alone[1][:3], alone[1][-1:]]), CLOSE)
    assert_near(torch.cat([first[2], second[0], third[1]]), torch.cat([alone[2][:8], alone[2][-1:]]), CLOSE)


def test_a_checkpoint_is_the_state_after_its_tokens(model: Decoder) -> None:
    """Another row starts from it, with the blocks of the first one: it has the same beginning."""
    ids, other, steps = prompt(20), prompt(9, seed=1), Steps(model)
    steps.run(Row(0, ids[:2], 0, 1))
    steps.run(Row(1, other, 0, 2, checkpoints=[(8, 7)]), Row(0, ids[2:], 1, 3, checkpoints=[(1, 4), (14, 5), (17, 6)]))
    for length, slot in ((3, 4), (16, 5), (19, 6)):
        steps.pool.tables[2], steps.pool.lengths[2] = steps.pool.tables[0], length
        again = steps.run(Row(2, ids[length:], read=slot, write=8))
        assert_near(again[0], whole(model, ids)[length:], CLOSE)
    steps.pool.tables[2], steps.pool.lengths[2] = steps.pool.tables[1], 8
    assert_near(steps.run(Row(2, other[8:], read=7, write=8))[0], whole(model, other)[8:], CLOSE)


def test_a_step_can_be_computed_twice(model: Decoder) -> None:
    steps = Steps(model)
    steps.run(Row(0, prompt(5), 0, 1))
    rows = Row(0, prompt(6, seed=1), 1, 2, checkpoints=[(4, 3)]), Row(1, prompt(3, seed=2), 0, 4)
    first = steps.run(*rows)
    states = [{name: buffer.clone() for name, buffer in layer.items()} for layer in steps.states]
    assert all(torch.equal(*both) for both in zip(first, steps.again(*rows), strict=True))
    for layer, before in zip(steps.states, states, strict=True):
        assert all(torch.equal(layer[name].nan_to_num(), before[name].nan_to_num()) for name in before)


def test_padding_stores_no_state_and_the_null_slot_keeps_its_zeros(model: Decoder) -> None:
    steps = Steps(model)
    steps.run(Row(0, prompt(2), 0, 1), Row(1, [0], 0, NO_STATE))
    for layer in steps.states:
        for buffer in layer.values():
            assert not buffer[0].any() and buffer[1].isfinite().all() and buffer[2:].isnan().all()


# -- GGUF files


# promise: family-gguf
@pytest.mark.parametrize(("name", "old"), [("qwen3.5", False), ("qwen3.5 moe", False), ("qwen3-next", False), ("qwen3-next", True)])
def test_a_gguf_file_of_a_hybrid_gives_the_logits_of_its_folder(name: str, old: bool, tmp_path: Path) -> None:
    folder, ids = family_model(tmp_path / "model", HYBRIDS[name], seed=24), prompt(20)
    file = hybrid_gguf(folder, tmp_path / "model.gguf", HYBRIDS[name], old=old)
    assert_near(whole(load(file), ids), whole(load(folder), ids), CLOSE)


# promise: family-gguf
@pytest.mark.parametrize(("name", "further"), [("qwen3.5", 1), ("qwen3.5 moe", 2), *rarely(("qwen3-next", 1))])
def test_layers_of_a_gguf_file_that_predict_further_tokens_are_left_out(name: str, further: int, tmp_path: Path) -> None:
    """llama.cpp's converter writes them by default: they are counted in `block_count`, and have the last numbers."""
    folder, ids = family_model(tmp_path / "model", HYBRIDS[name], seed=26), prompt(20)
    file = hybrid_gguf(folder, tmp_path / "model.gguf", HYBRIDS[name], further=further)
    assert_near(whole(load(file), ids), whole(load(folder), ids), CLOSE)
    without = hybrid_gguf(folder, tmp_path / "without.gguf", HYBRIDS[name])
    one, other = model_shape(str(file)), model_shape(str(without))
    assert one.needs("float32") == other.needs("float32") and one.weights == other.weights, "memory is planned without them"
    alone = hybrid_gguf(folder, tmp_path / "mtp.gguf", HYBRIDS[name], further=further, trunk=False)
    with pytest.raises(LoadError, match=r"mtp\.gguf: has only layers that predict further tokens"):
        load(alone)


@pytest.mark.parametrize("v_dim", [32, 16])  # whole groups, and halves of them
def test_codes_of_a_gguf_file_are_in_the_order_of_the_model(v_dim: int, tmp_path: Path) -> None:
    """Matrices stay quantised while their rows, or columns, are reordered."""
    tiny = HYBRIDS["qwen3.5"]
    tiny = replace(tiny, options=tiny.options | {"hidden_size": 64, "intermediate_size": 32, "linear_value_head_dim": v_dim})
    folder = family_model(tmp_path / "model", tiny, seed=25)
    _, file = opened(hybrid_gguf(folder, tmp_path / "model.gguf", tiny, kind="Q8_0"))
    _, plain = opened(folder)
    assert sorted(file.names()) == sorted(plain.names())
    quantised = 0
    for name in file.names():
        values, codes = file.read(name), file.packed(name)
        assert values.shape == plain.read(name).shape == file.shape(name), name
        assert (values - plain.read(name)).abs().max() < 0.02 * plain.read(name).abs().max(), name
        if codes is not None:
            quantised += 1
            assert torch.equal(folded(codes).dequantize(), values), name
            blocks = file.blocks(name)
            assert (blocks is None) == name.endswith("out_proj.weight"), "only rows can be reordered in blocks"
            if blocks is not None:
                stored = dequantize(torch.from_numpy(blocks.raw), blocks.kind, blocks.shape)
                assert torch.equal(stored if blocks.rows is None else stored[torch.from_numpy(blocks.rows)], values), name
    assert quantised > 20
