"""Beam search over HTTP: the fields of a body that ask for it, and those that it cannot have beside them."""

from dataclasses import replace

from octavo.errors import RequestError
from octavo.messages import Beams
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.request_bodies import ChatBody, CompletionBody

# A search gives its answers when all are there, and ranks by the model's own logprobs: nothing may change these, or end a beam by its text.
_BESIDE = (
    "stream", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
    "stop", "stop_token_ids", "structured_outputs", "response_format",
)  # fmt: skip
_HARMLESS = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
_OWN = ("beam_width", "length_penalty", "early_stopping")


def beams_of(body: CompletionBody | ChatBody, most: int) -> Beams | None:
    """Returns the search that a body asks for, if it does. `most`: the widest that this server allows"""
    if not body.use_beam_search:
        for name in _OWN:
            if getattr(body, name) not in (None, False, *((1,) if name == "length_penalty" else ())):
                raise RequestError(f"{name} is given, but use_beam_search is not true", name)
        return None
    for name in _BESIDE:
        value = getattr(body, name)
        if value and value != _HARMLESS.get(name) and value != {"type": "text"}:
            raise RequestError(f"{name} cannot be used with beam search; leave it out, or use_beam_search", name)
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs cannot be used with beam search; leave one of them out, or use_beam_search", "echo")
    width = (body.n or 1) if body.beam_width is None else body.beam_width
    if width > most:
        raise RequestError(f"the beam width is {width}, at most {most} is allowed", "beam_width" if body.beam_width else "n")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    checked = BeamSearchParams(width, 1, length_penalty=penalty, early_stopping=body.early_stopping or False)
    return Beams(checked.beam_width, checked.length_penalty, checked.early_stopping)


def for_beams(params: SamplingParams) -> SamplingParams:
    """Returns the same without what says how tokens are drawn, wherever it came from: beams are not drawn."""
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, repetition_penalty=1.0)
