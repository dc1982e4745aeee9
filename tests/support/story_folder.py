"""stories260K with its tokenizer and a chat template, as a Hugging Face folder: a real model that opens in a moment."""

import json
import sys
from pathlib import Path
from typing import Any

from octavo.text.gguf_tokenizer import CONTROL
from octavo.text.tokenizer import Tokenizer
from tests.support.models import stories260k
from tests.support.tokenizers import stories_metadata

TEMPLATE = "{{ bos_token }}{% if tools %}Tools: {% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"


def story_folder(folder: Path, end_ids: list[int] | None = None, last_token: str | None = None) -> Path:
    """With `end_ids`, these end a story instead of the model's own; `last_token`: a special token in place of the last one."""
    stories260k(folder)
    metadata: dict[str, Any] = stories_metadata()
    if last_token is not None:
        metadata["tokenizer.ggml.tokens"][-1] = last_token
        metadata["tokenizer.ggml.token_type"][-1] = CONTROL
    Tokenizer.from_gguf(metadata, "tok512.bin")._backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>"}
    if end_ids is None:
        special["eos_token"] = "</s>"
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": end_ids}))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


if __name__ == "__main__":
    print(story_folder(Path(sys.argv[1])))
