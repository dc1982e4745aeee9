"""The parts of the command line that need no process: flags, words, the terminal, the conversation."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from octavo.cli.args import Parser, add_engine_flags, engine_config
from octavo.cli.chat import Terminal
from octavo.cli.chat_session import AnswerStats, ChatSession, LocalAnswers, _note_delta, _note_event
from octavo.cli.generate import Answer, JsonWriter, Row, Sample, TextWriter
from octavo.cli.words import looks_like_model, looks_like_server, may_name_model
from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.inputs import Conversation
from octavo.llm import LLM
from octavo.loading.resolve import resolve_model
from octavo.loading.text_side import load_tokenizer
from octavo.messages import HitReason, LifeRecord
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import PromptEncoder
from octavo.text.reasoning import Piece


def engine_parser() -> Parser:
    parser = Parser(prog="octavo try", allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    add_engine_flags(parser)
    return parser


# promise: flags-fields-engineconfig, load-format, chat-template, max-logprobs, attention-backend
def test_every_engine_setting_is_a_flag_and_none_given_is_the_default() -> None:
    parser = engine_parser()
    shown = parser.format_help()
    without = [field.name for field in fields(EngineConfig) if not re.search(rf"--{field.name.replace('_', '-')}[ ,]", shown)]
    assert without == ["skip_tokenizer_init"]  # commands speak text
    assert engine_config(parser.parse([])) == EngineConfig()


# promise: flags-fields-engineconfig, dtype, max-model-len, kv-cache-memory, enable-prefix-caching, seed
def test_flags_become_settings_wherever_they_stand() -> None:
    args = engine_parser().parse(
        ["one", "--max-model-len", "32k", "--kv-cache-memory-bytes", "512m", "two", "--no-enable-prefix-caching", "--dtype", "float32"]
        + ["--seed", "7", "--model", "folder", "--num-gpu-blocks-override=100", "three", "-"]
    )
    assert args.words == ["one", "two", "three", "-"]
    expected = EngineConfig(
        model="folder",
        max_model_len=32768,
        kv_cache_memory_bytes=512 * 2**20,
        enable_prefix_caching=False,
        dtype="float32",
        seed=7,
        num_gpu_blocks_override=100,
    )
    assert engine_config(args) == expected
    assert engine_config(args, "other").model == "other"
    assert engine_config(engine_parser().parse(["--max-model-len", "auto"])).max_model_len is None


# promise: word-model-question
def test_one_word_is_a_model_a_server_a_question_or_not_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2").mkdir()
    assert all(map(looks_like_model, ["SmolLM2", "gone.gguf", "owner/name", "./a", str(tmp_path), "SmolLM2-135M-Instruct"]))
    questions = ["Is it a/b?", "either/or?", "what is /etc", "", "2+2", "Hello!", "Qwen or llama3?", "今日は天気がいいですか", "你好"]
    not_clear = ["Hello", "llama", "llama3.2", "qwen3:0.6b", "mistral", "x" * 5000]
    assert not any(map(looks_like_model, questions + not_clear))
    assert all(map(may_name_model, not_clear)) and not any(map(may_name_model, questions))
    servers = ["localhost:8000", "http://gpu-7", "https://host/v1", "127.0.0.1:80", "[::1]:8000", "gpu-7.lan:8000/v1", "localhost"]
    assert all(map(looks_like_server, servers)) and not any(map(looks_like_server, questions + not_clear + ["1:2", "owner/name:Q8_0"]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"messages": [{"role": "wizard", "content": "Hello"}]}, r"messages\[0\].role is 'wizard'"),
        ({"messages": []}, "at least one message"),
        ({"prompt": "half a character \ud83d"}, "unpaired surrogate"),
        ({"prompt": 5}, "a prompt is a str, a list of token ids"),
    ],
)
def test_a_line_no_model_can_take_is_named(given: dict[str, object], said: str) -> None:
    encoder = PromptEncoder(load_tokenizer(resolve_model(None)), None)
    with pytest.raises(RequestError, match=f"p.jsonl line 2: .*{said}"):
        Row("p.jsonl line 2", given, SamplingParams()).encode(encoder, as_chat=False)


# promise: environment-color, chat-thinking-text
def test_thinking_is_dim_at_a_terminal_and_plain_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> str:
        terminal = Terminal()
        terminal.write(Piece("reasoning", "hm"))
        terminal.write(Piece("content", "Yes."))
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert written() == "hmYes."
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert written() == "\x1b[2mhm\x1b[0mYes."
    monkeypatch.setenv("NO_COLOR", "1")
    assert written() == "hmYes."


def test_what_a_model_says_cannot_steer_a_terminal_and_a_pipe_gets_it_exactly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "a\tb\nc \x1b]0;owned\x07 \x9b31m \x90 \r \x08\x7f \u00a0\u00e9\u6f22"
    clean = "a\tb\nc \u241b]0;owned\u2407 \ufffd31m \ufffd \u240d \u2408\u2421 \u00a0\u00e9\u6f22"
    answers = [Answer({"prompt": "p"}, 1, [Sample(said, 1, "stop")])]

    def written() -> tuple[str, str, str, str]:
        for sign in said:  # in pieces, as it comes
            Terminal().write(Piece("content", sign))
        chat = capsys.readouterr().out
        Terminal().say(said)
        note, text, record = capsys.readouterr().out, "", ""
        for writer in (TextWriter(answers), JsonWriter(answers, "-")):
            with writer:
                writer.advance()
            text, record = record, capsys.readouterr().out
        return chat, note, text, record

    monkeypatch.setenv("NO_COLOR", "1")
    chat, note, text, record = written()
    assert (chat, note, text) == (said, said + "\n", said + "\n") and json.loads(record)["outputs"][0]["text"] == said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chat, note, text, record = written()
    assert (chat, note, text) == (clean, clean + "\n", clean + "\n")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", record), "JSON writes some of them as they are"


# promise: octavo-generate-streams
def test_texts_come_in_the_order_of_the_prompts_each_as_soon_as_it_is_due(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answers = [Answer({"prompt": "a"}, 3, [Sample()]), Answer({"prompt": "b"}, 2, [Sample(), Sample()])]
    news = [
        (0, TextDelta("7", 0, "On", [1])),
        (1, TextDelta("8", 1, "second", [2], "stop")),
        (1, TextDelta("8", 0, "first ", [3])),
        (0, TextDelta("7", 0, "ce", [4], "length", life=LifeRecord(0.0, cached_tokens=2))),
        (1, TextDelta("8", 0, "sample", [5], "stop")),
    ]
    seen, lines = [], []
    with TextWriter(answers) as texts, JsonWriter(answers, str(out)) as records:
        for index, delta in news:
            answers[index].take(delta)
            texts.advance()
            records.advance()
            seen.append(capsys.readouterr().out)
            lines.append(len(out.read_text().splitlines()) if out.exists() else 0)
    assert seen == ["On", "", "", "ce\n---\nfirst ", "sample\n---\nsecond"] and capsys.readouterr().out == "\n"
    assert lines == [0, 0, 0, 1, 2]
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2}
    assert [sample["text"] for sample in second["outputs"]] == ["first sample", "second"]
    with pytest.raises(KeyboardInterrupt), TextWriter([Answer({}, 1, [Sample("cut off")])]) as texts:
        texts.advance()
        raise KeyboardInterrupt
    assert capsys.readouterr().out == "cut off\n"


class Scripted:
    """Stands for an LLM whose answers are known."""

    model_name = "scripted"

    def __init__(self, *answers: str, max_model_len: int = 8192) -> None:
        self.answers = iter(answers)
        self.prompts: list[str] = []
        self.max_model_len = max_model_len
        self.tokenizer = load_tokenizer(resolve_model(None))
        self.encoder = PromptEncoder(self.tokenizer, None)

    def stats(self) -> object:
        return SimpleNamespace(num_blocks=10, free_blocks=7)

    def stream_chat(self, messages: Conversation, params: SamplingParams) -> Iterator[TextDelta]:
        ids = self.encoder.encode_chat(messages)[1]
        if len(ids) + (params.max_tokens or 1) > self.max_model_len:
            raise RequestError("too long", "prompt", "context_length_exceeded")
        self.prompts.append(self.tokenizer.decode(ids, skip_special_tokens=False))
        for character in next(self.answers):
            yield TextDelta("0", 0, character, [1])
        yield TextDelta("0", 0, "", [2], "stop")


def session_of(llm: Scripted, notes: list[str], max_tokens: int | None = 16) -> ChatSession:
    return ChatSession(LocalAnswers(cast(LLM, llm), SamplingParams(max_tokens=max_tokens)), "Be kind.", notes.append)


@pytest.mark.parametrize("reason", ["no_state", "state_evicted", "differs"])
def test_figures_say_how_much_was_in_the_cache_if_its_state_was_not(reason: HitReason) -> None:
    life, stats = LifeRecord(0.0, cached_tokens=4096, common_tokens=5008, hit_reason=reason), AnswerStats()
    stats.prompt_tokens = 6000
    _note_delta(stats, TextDelta("0", 0, "Yes", [1], life=life), "")
    local = stats.lines()[1]
    usage, remote = {"prompt_tokens": 6000, "prompt_tokens_details": {"cached_tokens": 4096}}, AnswerStats()
    _note_event(remote, {"timings": {"hit_reason": reason, "common_tokens": 5008}, "usage": usage})
    assert remote.lines()[1] == local
    why = {"no_state": "no state was kept after the rest of them", "state_evicted": "the next state was evicted"}.get(reason)
    more = f"{reason}: 5008 were in the cache, but {why}" if why else reason
    assert local == f"prompt  6000 tokens, 4096 of them cached ({more})"


# promise: chat-thinking-text
def test_thinking_is_left_out_of_the_next_turn() -> None:
    llm = Scripted("<think>secret</think>\n\nForty-two.", "Yes.")
    session = session_of(llm, [])
    assert "".join(piece.text for piece in session.ask("What is it?")) == "<think>secret</think>\n\nForty-two."
    list(session.ask("Are you sure?"))
    assert "secret" not in llm.prompts[1]
    assert "What is it?<|im_end|>\n<|im_start|>assistant\nForty-two.<|im_end|>" in llm.prompts[1]


def test_an_answer_left_early_stays_and_one_never_begun_does_not() -> None:
    llm = Scripted("Long answer", "Never seen", "Good.")
    session = session_of(llm, [])
    answer = session.ask("First?")
    for _ in range(4):
        next(answer)
    answer.close()
    never = session.ask("Second?")
    next(never)
    never.close()
    session.turns[-1].answer = ""
    list(session.ask("Third?"))
    assert "assistant\nLong<|im_end|>" in llm.prompts[2] and "Second?" not in llm.prompts[2]


# promise: chat-full-context
def test_the_oldest_turns_go_and_the_system_prompt_stays() -> None:
    notes: list[str] = []
    llm = Scripted(*["Fine."] * 20, max_model_len=120)
    session = session_of(llm, notes)
    for number in range(20):
        list(session.ask(f"Question {number}?"))
    assert notes and set(notes) == {"the context of 120 tokens is full: the oldest turn is left out"}
    assert "Be kind." in llm.prompts[-1] and "Question 18?" in llm.prompts[-1] and "Question 0?" not in llm.prompts[-1]
    assert session.turns[-1].question == "Question 19?"


def test_a_question_too_long_for_the_context_costs_no_turns() -> None:
    notes: list[str] = []
    session = session_of(Scripted("One.", "Two.", max_model_len=120), notes)
    list(session.ask("First?"))
    with pytest.raises(RequestError, match="too long"):
        list(session.ask("word " * 200))
    assert [turn.question for turn in session.turns] == ["First?"]
    assert notes == []


def test_room_is_kept_for_an_answer_of_no_stated_length() -> None:
    notes: list[str] = []
    llm = Scripted(*["Fine."] * 20, max_model_len=160)
    session = session_of(llm, notes, max_tokens=None)
    for number in range(20):
        list(session.ask(f"Question {number}?"))
        assert session.stats is not None and session.stats.prompt_tokens <= 120
    assert notes
