"""What ends a text by itself: the ids of config.json, of generation_config.json and of the tokenizer, together."""

import json
from pathlib import Path

from octavo import LLM, SamplingParams
from tests.support.story_folder import story_folder

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"
END, COMMA, PERIOD = 2, 432, 426


def test_end_ids_are_the_union_of_both_configs_and_the_tokenizers(tmp_path: Path) -> None:
    folder = story_folder(tmp_path, end_ids=[END])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [COMMA, END]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "."}))
    with LLM(str(folder), num_gpu_blocks_override=40) as llm:
        assert llm._core.scheduler.end_ids == {END, COMMA, PERIOD}  # type: ignore[attr-defined]
        texts = [llm.generate(PROMPT + more, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0] for more in ("", " outside. One")]
    assert [(one.text, one.token_ids[-1], one.finish_reason) for one in texts] == [
        (" outside in the park", PERIOD, "stop"),
        (" day", COMMA, "stop"),
    ]
