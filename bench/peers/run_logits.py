"""What llama.cpp computes of a GGUF file, in float32: ids of texts, and the logits after every token of sequences.

    python run_logits.py model.gguf CONTEXT < request > reply

    request   {"texts": [text, ...], "sequences": [[id, ...], ...]}, as JSON
    reply     {"ids": [[id, ...], ...], "logits": [base64 of float32 numbers, ...]}

Keys and values are kept in float32, and attention is computed by plain products: nothing is rounded on the way.
"""

import base64
import ctypes
import json
import os
import sys

import llama_cpp as lib

FLOAT32 = 0  # of ggml's types


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints goes the way of its errors
    request = json.load(sys.stdin)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot read {sys.argv[1]}")
    ids = [tokenize(lib.llama_model_get_vocab(model), text.encode()) for text in request["texts"]]
    logits = [logits_of(model, int(sys.argv[2]), sequence) for sequence in request["sequences"]]
    json.dump({"ids": ids, "logits": [base64.b64encode(each).decode() for each in logits]}, replies)


def tokenize(vocabulary: object, text: bytes) -> list[int]:
    room = (lib.llama_token * (len(text) + 8))()
    count = lib.llama_tokenize(vocabulary, text, len(text), room, len(room), True, False)
    return list(room[:count])


def logits_of(model: object, context_size: int, ids: list[int]) -> bytes:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = context_size
    params.type_k = params.type_v = FLOAT32
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_threads = params.n_threads_batch = 1
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for position, token in enumerate(ids):
        batch.token[position], batch.pos[position], batch.logits[position] = token, position, True
        batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
    if code := lib.llama_decode(context, batch):
        raise SystemExit(f"llama_decode gave {code}")
    size = len(ids) * lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)) * 4
    found = ctypes.string_at(lib.llama_get_logits(context), size)
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    return found


if __name__ == "__main__":
    main()
