"""A tokenizer and a model that do not quite belong together: refused at start, or harmless, but never a crash."""

import json
from pathlib import Path

import pytest
import tokenizers

from octavo import LLM, SamplingParams
from octavo.errors import LoadError, RequestError
from tests.support.story_folder import story_folder


def opened(folder: Path) -> LLM:
    return LLM(str(folder), num_gpu_blocks_override=40)


def test_a_token_the_model_does_not_have_is_refused_at_start_and_its_id_at_the_door(tmp_path: Path) -> None:
    folder = story_folder(tmp_path)
    sound = (folder / "tokenizer.json").read_bytes()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<extra>"])  # id 512, and the model has 512 rows
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(LoadError, match="the tokenizer has ids up to 512, the model's vocabulary ends at 511"):
        opened(folder)
    (folder / "tokenizer.json").write_bytes(sound)
    with opened(folder) as llm:
        with pytest.raises(RequestError, match="token id 512 in prompt is out of vocabulary, which has 512 ids"):
            llm.generate([[1, 512]], use_tqdm=False)
        (output,) = llm.generate("Once", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_an_id_the_tokenizer_does_not_have_is_no_text(tmp_path: Path) -> None:
    folder = story_folder(tmp_path)
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["model"]["vocab"] = {token: token_id for token, token_id in stored["model"]["vocab"].items() if token_id < 511}
    path.write_text(json.dumps(stored))
    with opened(folder) as llm:
        assert llm.get_tokenizer().token(511) == ""
        params = SamplingParams(max_tokens=5, allowed_token_ids=[511], ignore_eos=True, logprobs=0)
        (output,) = llm.generate("Once", params, use_tqdm=False)
    (sample,) = output.outputs
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [511] * 5, "length")
