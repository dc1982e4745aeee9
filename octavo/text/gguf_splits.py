"""How byte-level tokenizers of GGUF files cut a text before they merge: the kinds that `tokenizer.ggml.pre` names.

    gpt-2, default, olmo, phi-2            words, runs of digits, runs of signs
    smollm, refact, starcoder, command-r   the same, with every digit by itself
    qwen2, deepseek-r1-qwen                contractions, words with one sign before them, single digits
    llama-bpe, dbrx, smaug-bpe, glm4, ...  the same, with up to three digits
    bloom                                  at spaces and after signs
    tekken                                 words are cut where small letters end and capitals begin, single digits
    gpt-4o, llama4                         the same with contractions, and up to three digits

They are data: each is the pattern that the tokenizer.json of such models has.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _by_case(ending: str, digits: str) -> str:
    """Returns a pattern that cuts words at capitals. `ending`: of a word, `digits`: that stay together"""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Split:
    make: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False  # a word that is a token is taken as it is, whatever merges lead to
    begins: bool = False  # a text begins with BOS, unless the file says otherwise
    composed: bool = False  # characters are composed first (NFC)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "phi-2"), Split(_gpt2)),
    **dict.fromkeys(("smollm", "refact", "starcoder"), Split(_single_digits)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split(_pattern(_QWEN2), composed=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Split(_pattern(_LLAMA3), whole_words=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4"), Split(_pattern(_LLAMA3))),
    "command-r": Split(_single_digits, composed=True),
    "bloom": Split(_pattern(r" ?[^(\s|.,!?…。，、।۔،)]+")),
    "tekken": Split(_pattern(_by_case("", r"\p{N}")), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split(_pattern(_by_case(_ENDING, r"\p{N}{1,3}")))),
}
