"""Where messages end in the prompt of a conversation: the lengths of prefixes that other conversations may continue.

    system ... | earlier messages ... | last question | ... | generation prompt        | one of the ends

Other conversations have the system messages, another last question, another answer to it, or go on after the last message. Other ends
were the last ones of earlier turns. Templates write a message differently if others follow: some drop the thoughts of earlier answers,
some write a system message into a question. So the prompt is compared with the text of a conversation that has other messages from
there on. A rendering costs far more than a comparison, so there is one for each end, and at most four.
"""

from collections.abc import Callable, Mapping, Sequence

from octavo.errors import RequestError, TemplateError

Rendered = Callable[[list[Mapping[str, object]]], str]


def message_ends(
    messages: Sequence[Mapping[str, object]], text: str, ids: list[int], render: Rendered, encode: Callable[[str], list[int]]
) -> list[int]:
    """Returns lengths in tokens, in ascending order. `text`, `ids`: the prompt. An end that the template cannot render is left out."""
    found = {0: 0}  # characters -> tokens
    for end in _ends(messages):
        try:
            cut = common_length(text, render(_with_others(messages, end)))
            found[cut] = found[cut] if cut in found else _tokens_before(cut, text, ids, encode)
        except (TemplateError, RequestError):
            continue
    return sorted({*found.values()} - {0})


def _ends(messages: Sequence[Mapping[str, object]]) -> set[int]:
    """Returns how many messages there are before each end."""
    roles = [message["role"] for message in messages]
    instructions = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    question = max((at for at, role in enumerate(roles) if role == "user"), default=0)
    return {instructions, question, question + 1, len(roles)} - {0}


def _with_others(messages: Sequence[Mapping[str, object]], end: int) -> list[Mapping[str, object]]:
    """Returns the messages before an end, and others instead of the rest."""
    replaced = str(messages[end]["content"]) if end < len(messages) else ""
    question = {"role": "user", "content": "1. No" if replaced.startswith("Y") else "Yes"}
    answer = {"role": "assistant", "content": "Yes"}
    others = {"user": [answer, question], "tool": [answer]}  # after a question, templates may drop the thoughts before the calls of tools
    return [*messages[:end], *others.get(str(messages[end - 1]["role"]), [question])]


def _tokens_before(cut: int, text: str, ids: list[int], encode: Callable[[str], list[int]]) -> int:
    """Returns how many tokens are in the first `cut` characters. Only the shorter side is encoded, unless a token is on both."""
    if 2 * cut > len(text):
        rest = encode(text[cut:]) if cut < len(text) else []
        if ids[len(ids) - len(rest) :] == rest:
            return len(ids) - len(rest)
    return common_length(ids, encode(text[:cut]))


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns how many items at the beginning are equal. Slices are compared, which is faster than item by item."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
