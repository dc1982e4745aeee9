"""Hostile tokenizers and chat templates: what the `tokenizers` library would trust, and what jinja2 would run."""

import json
from typing import Any

from tests.support import tiny_files as tiny
from tests.support.hostile_case import Case, Words, folder_case, several


def tokenizer_cases() -> list[Case]:
    def tokenizer(name: str, words: Words, content: Any) -> Case:
        return folder_case(127, name, ("tokenizer.json", *several(words)), {"tokenizer.json": content})

    def beyond(name: str, content: Any) -> Case:
        return folder_case(127, name, ("the tokenizer has ids up to", "vocabulary ends at 15"), {"tokenizer.json": content})

    def part(name: str, path: str, value: Any, words: Words) -> Case:
        return tokenizer(name, words, tiny.changed(tiny.TOKENIZER, path, value))

    def regex(name: str, pattern: str, words: str) -> Case:
        return part(name, "pre_tokenizer.pretokenizers.0.pattern", {"Regex": pattern}, words)

    def settings(name: str, words: Words, **changes: Any) -> Case:
        return folder_case(127, name, words, {"tokenizer_config.json": {**tiny.TOKENIZER_CONFIG, **changes}})

    def template(name: str, words: str, source: str) -> Case:
        return folder_case(127, name, ("chat template", words), {"chat_template.jinja": source})

    vocab: dict[str, int] = tiny.TOKENIZER["model"]["vocab"]
    added: list[dict[str, Any]] = tiny.TOKENIZER["added_tokens"]
    further = {**added[0], "id": 16, "content": "<further>"}
    large = tiny.changed(tiny.TOKENIZER, "model.vocab", vocab | {"y": 14, "z": 15})
    large["added_tokens"] = [{**token, "id": token["id"] + 2} for token in added]
    growing = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaaaa"}] * 9}
    doubling = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "x?"}, "content": "a"}] * 40}
    nested: dict[str, Any] = {"type": "NFC"}
    for _ in range(200):
        nested = {"type": "Sequence", "normalizers": [nested]}
    said_twice = json.dumps(tiny.TOKENIZER)[:-1] + ', "normalizer": null}'
    special = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}], "pair": [], "special_tokens": {}}
    many = [{**added[0], "id": 14 + i, "content": f"<{i}>"} for i in range(70_000)]
    return [
        tokenizer("missing", "lacks tokenizer.json", None),
        tokenizer("bad JSON", "not valid JSON", "{"),
        tokenizer("nothing in it", "model must be a dict", {}),
        tokenizer("a part said twice", "occurs twice", said_twice),
        beyond("larger than the vocabulary", large),
        beyond("added id outside", tiny.changed(tiny.TOKENIZER, "added_tokens", [*added, further])),
        part("id 2^31 in the vocabulary", "model.vocab.x", 2**31, "model.vocab gives 'x'"),
        beyond("id outside with a hole before", tiny.changed(tiny.TOKENIZER, "model.vocab.x", 16)),
        beyond("template puts in an id outside", tiny.changed(tiny.TOKENIZER, "post_processor.special_tokens.<s>.ids", [16])),
        part("added id that does not follow", "added_tokens.1.id", 900, "id 900"),
        part("added id that is text", "added_tokens.1.id", "15", "id '15'"),
        part("added token of a megabyte", "added_tokens.1.content", "x" * 10**6, "1,000,000 characters"),
        part("70,000 added tokens", "added_tokens", many, "70,000 added_tokens"),
        part("table that takes gigabytes", "normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////wAA"}, "'Precompiled'"),
        part("part without a type", "normalizer", {"precompiled_charsmap": "/////wAA"}, "normalizer: type"),
        part("text grows a billionfold", "normalizer", growing, "one character"),
        part("text doubles forty times", "normalizer", doubling, "regex Replace"),
        part("200 parts in each other", "normalizer", nested, "too many parts"),
        part("nothing to prepend", "normalizer", {"type": "Prepend", "prepend": ""}, "Prepend"),
        part("nothing to replace", "normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, "pattern of 0"),
        part("chunks of no length", "pre_tokenizer", {"type": "FixedLength", "length": 0}, "'FixedLength'"),
        part("template of unknown tokens", "post_processor", special, "'X' is none of"),
        part("decoder that cuts too much", "decoder", {"type": "Strip", "content": "x", "start": 0, "stop": 9}, "stop 0"),
        part("decoder of another kind", "decoder", {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}, "'CTC'"),
        part("prefix inside words", "model.continuing_subword_prefix", "##", "continuing_subword_prefix"),
        part("dropout", "model.dropout", 0.5, "dropout"),
        part("unknown token is none", "model.unk_token", "<unk>", "unk_token"),
        part("model of another kind", "model", {"type": "WordLevel", "vocab": {}, "unk_token": "x"}, "supported: BPE, Unigram"),
        part("pieces without a score", "model", {"type": "Unigram", "unk_id": 0, "vocab": ["a"]}, "pieces"),
        part("no piece for the unknown", "model", {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}, "unk_id"),
        part("merges of unknown tokens", "model.merges", [["a", "zz"]], "zz"),
        regex("pattern that does not close", "(", "not a tokenizer"),
        regex("pattern 4,000 deep", "(" * 4000 + ")" * 4000, "depth"),
        regex("pattern without end", "(?<a>\\g<a>)", "recursion"),
        regex("pattern of 10,000 letters", "x" * 10_000, "10,000 characters"),
        settings("end that is no token", ("tokenizer_config.json", "eos_token is '<nowhere>'"), eos_token="<nowhere>"),
        settings("end that is no text", "eos_token", eos_token={"content": 7}),
        settings("end that is no Unicode", "tokenizer", eos_token="\ud83d"),
        settings("names of templates that are lists", "chat_template", chat_template=[{"name": []}, {"name": "default", "template": 5}]),
        folder_case(127, "settings missing", "lacks tokenizer_config.json", {"tokenizer_config.json": None}),
        folder_case(127, "settings a list", ("tokenizer_config.json", "JSON object"), {"tokenizer_config.json": []}),
        template("template with an unknown tag", "nonsense", "{% nonsense %}"),
        template("template too deep", "recursion", "{{ " + "(" * 9000 + ")" * 9000 + " }}"),
        template("template of 100,000 letters", "at most", "x" * 100_000),
        folder_case(127, "template that is not UTF-8", ("chat_template.jinja", "not UTF-8"), {"chat_template.jinja": b"\xff"}),
    ]
