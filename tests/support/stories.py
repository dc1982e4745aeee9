"""The tokenizer of stories260K, told in the words of GGUF metadata.

llama2.c stores it as: max token length (int32), then per token score (float32), length (int32), bytes. Ids 0, 1, 2 are
unknown, begin and end; the next 256 are single bytes; spaces stand where sentencepiece writes "▁".
"""

import struct
from pathlib import Path

UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6
NUM_BYTES = 256


def stories_tokenizer_metadata(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    tokens, types = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL]
    scores: list[float] = []
    at = 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + length].decode()
        at += 8 + length
        token_id = len(scores)
        scores.append(score)
        if token_id >= 3:
            is_byte = token_id < 3 + NUM_BYTES
            tokens.append(piece if is_byte else piece.replace(" ", "▁"))
            types.append(BYTE if is_byte else NORMAL)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
