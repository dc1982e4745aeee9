"""Limits of a whole request: sums over its prompts and samples.

    answers    prompts * n                                              --max-prompts
    ids        those of bias, bans and stops * answers                  an engine keeps them for every one of its rows
    numbers    (logprobs + 1) * tokens of all answers, and of the
               prompts where they are echoed                            an answer is made in memory
    a form     its characters * prompts                                 it goes to the engine with every prompt
"""

from collections.abc import Sequence

from octavo.errors import RequestError
from octavo.messages import Limits
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import PARAM, StructuredOutputs

MOST_IDS = 2**18  # some 20 MB in the engine, and 0.2 s to take in
MOST_NUMBERS = 250_000  # some 60 MB while the answer is made
MOST_FORM_CHARS = 2**22


def check_answers(num_prompts: int, n: int, most: int) -> None:
    if num_prompts * n > most:
        raise RequestError(f"{num_prompts} prompts of {n} samples each are more than {most} answers (--max-prompts)", "n")


def check_totals(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], prompts: Sequence[int], limits: Limits, echo: bool = False
) -> None:
    """`bad_words`: as token ids; `prompts`: the length of each; `echo`: whether they are repeated before each answer."""
    _check_ids(params, bad_words, len(prompts) * params.n)
    _check_numbers(params, prompts, limits, echo)


def check_form(asked: StructuredOutputs | None, num_prompts: int) -> None:
    chars = 0 if asked is None else asked.num_chars
    if chars * num_prompts > MOST_FORM_CHARS:
        message = f"{PARAM} has {chars:,} characters for each of {num_prompts:,} prompts, at most {MOST_FORM_CHARS:,} in all are allowed"
        raise RequestError(f"{message}; send fewer prompts at once", PARAM)


def _check_ids(params: SamplingParams, bad_words: Sequence[Sequence[int]], answers: int) -> None:
    counts = {
        "logit_bias": len(params.logit_bias or ()),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "stop_token_ids": len(params.stop_token_ids),
        "bad_words": sum(map(len, bad_words)),
    }
    if sum(counts.values()) * answers > MOST_IDS:
        name = max(counts, key=counts.__getitem__)
        message = f"{name} has {counts[name]:,} token ids for each of {answers:,} answers; {', '.join(counts)} may have {MOST_IDS:,} in all"
        raise RequestError(f"{message}; send fewer prompts at once or lower n", name)


def _check_numbers(params: SamplingParams, prompts: Sequence[int], limits: Limits, echo: bool) -> None:
    if params.logprobs is None and not echo:
        return
    longest = limits.max_model_len if params.max_tokens is None else params.max_tokens
    answered = sum(max(min(longest, limits.max_model_len - length), 0) for length in prompts) if params.logprobs is not None else 0
    numbers = params.n * (1 + (params.logprobs or 0)) * (answered + (sum(prompts) if echo else 0))
    if numbers > MOST_NUMBERS:
        name = "echo" if params.logprobs is None else "logprobs"
        message = f"{name} may return {numbers:,} numbers, at most {MOST_NUMBERS:,} are allowed: one for each token of an answer"
        knobs = "send fewer prompts at once, or lower max_tokens, n or logprobs"
        raise RequestError(f"{message}, and one for each alternative; {knobs}", name)
