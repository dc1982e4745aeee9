"""What other servers offer and this one does not: refused by name, with what to use instead.

A field that changes the answer must not be ignored: the client would get the answer to another question. Fields that change nothing
are in body.ACCEPTED, and a field that no server has is ignored with a warning.
"""

from dataclasses import dataclass

from octavo.errors import RequestError

CODE = "unsupported_parameter"


@dataclass(frozen=True, slots=True)
class Refusal:
    instead: str = ""  # what to do; "" where there is nothing
    harmless: tuple[object, ...] = ()  # values, beside null, that ask for nothing


def _form(name: str) -> Refusal:
    return Refusal(f'use structured_outputs {{"{name}": ...}}')


_NO_BACKEND = Refusal("leave it out: every form is compiled by llguidance")
_NO_BEAMS = "there is no beam search; use n for several samples"

# In every body. Of OpenAI's API, of vLLM's, and forms as SGLang and llama.cpp spell them.
FIELDS: dict[str, Refusal] = {
    "audio": Refusal("this server takes and writes text"),
    "modalities": Refusal("this server writes text", (["text"],)),
    "prediction": Refusal(),
    "web_search_options": Refusal(),
    "functions": Refusal("use tools"),
    "function_call": Refusal("use tool_choice"),
    "best_of": Refusal("use n for several samples", (1,)),
    "use_beam_search": Refusal(_NO_BEAMS, (False,)),
    "length_penalty": Refusal(_NO_BEAMS, (1, 1.0)),
    "early_stopping": Refusal(_NO_BEAMS, (False,)),
    "guided_json": Refusal('use structured_outputs {"json": ...} or response_format'),
    "guided_regex": _form("regex"),
    "guided_choice": _form("choice"),
    "guided_grammar": _form("grammar"),
    "guided_json_object": Refusal('use response_format {"type": "json_object"}', (False,)),
    "guided_decoding_backend": _NO_BACKEND,
    "guided_whitespace_pattern": _NO_BACKEND,
    "json_schema": Refusal('use structured_outputs {"json": ...} or response_format'),
    "regex": _form("regex"),
    "grammar": _form("grammar"),
    "ebnf": _form("grammar"),
    "structural_tag": Refusal("use structured_outputs or tools"),
    "prompt_logprobs": Refusal("use /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": Refusal("shorten the prompt; /tokenize counts its tokens"),
    "prompt_embeds": Refusal("send text or token ids"),
    "logits_processors": Refusal("use logit_bias, bad_words or structured_outputs"),
    "chat_template": Refusal("the server has one template (--chat-template)"),
    "documents": Refusal("put them into a message"),
    "mm_processor_kwargs": Refusal("images, audio and video are not supported yet"),
    "add_generation_prompt": Refusal('use chat_template_kwargs {"add_generation_prompt": ...}', (True,)),
    "continue_final_message": Refusal('use chat_template_kwargs {"continue_final_message": ...}', (False,)),
    "n_predict": Refusal("use max_tokens"),
}

# How the path of a route begins -> what it is for.
_ROUTES: dict[str, str] = {
    "/v1/embeddings": "embeddings are",
    "/embeddings": "embeddings are",
    "/pooling": "pooling is",
    "/classify": "classification is",
    "/rerank": "reranking is",
    "/v1/rerank": "reranking is",
    "/v2/rerank": "reranking is",
    "/score": "scoring is",
    "/v1/score": "scoring is",
    "/v1/moderations": "moderation is",
    "/v1/audio": "audio is",
    "/v1/realtime": "audio is",
    "/v1/images": "image generation is",
    "/v1/videos": "video generation is",
    "/v1/files": "files are",
    "/v1/uploads": "files are",
    "/v1/batches": "batches are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/assistants": "the Assistants API is",
    "/v1/threads": "the Assistants API is",
    "/v1/vector_stores": "vector stores are",
    "/v1/conversations": "conversations are",
    "/v1/messages": "Anthropic's API is",
    "/api": "Ollama's API is",
}
SUPPORTED = "this server answers /v1/chat/completions, /v1/completions and /v1/responses"


def check_field(name: str, value: object, refusal: Refusal) -> None:
    is_harmless = value is None or any(type(value) is type(one) and value == one for one in refusal.harmless)  # True is not 1
    if not is_harmless:
        raise RequestError(f"{name} is not supported" + (f"; {refusal.instead}" if refusal.instead else ""), name, CODE)


def missing_route(path: str) -> str:
    """What a client that asks for a route that is not there is told."""
    for start, what in _ROUTES.items():
        if path == start or path.startswith(f"{start}/"):
            return f"{what} not supported; {SUPPORTED}"
    return "there is no such route"
