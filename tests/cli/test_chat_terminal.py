"""The commands at a terminal: a chat typed into, interrupted, left; a batch with its progress line."""

import json
import re
from pathlib import Path

from tests.cli.processes import FAKE, SECONDS, SLOW, Typist


# promise: octavo-chat, chat-opens-multi, chat-help-system, cached-tokens-always
def test_a_conversation_from_banner_to_ctrl_d(tmp_path: Path) -> None:
    env = {**FAKE, "HOME": str(tmp_path)}
    with Typist("chat", "--max-tokens", "6", "--system", "Be brief.", "--max-model-len", "2k", cwd=tmp_path, env=env) as chat:
        assert "loading the default model ..." in chat.expect(r"SmolLM2-135M-Instruct, context of 2048 tokens")
        chat.expect(">>> ")
        listed = re.findall(r"^(?:\x1b\[2m)?(/\w+)", chat.ask("/help"), re.MULTILINE)
        assert listed == ["/help", "/system", "/clear", "/retry", "/save", "/stats", "/bye"]
        assert "no question to ask again" in chat.ask("/retry")
        assert re.search(r"blocks  [1-9] of \d+ in use", chat.ask_twice())
        chat.type('"""one\r')
        chat.expect(r"\.\.\. ")
        assert chat.ask('  two"""').strip()
        assert "did you mean /stats?" in chat.ask("/stat")
        assert "system prompt: Be loud." in chat.ask("/system Be loud.")
        assert "saved 2 turns" in chat.ask("/save talk.json")
        assert "talk.json: File exists" in chat.ask("/save talk.json")
        chat.ask("/clear")
        assert "no question to ask again" in chat.ask("/retry")
        assert "\x1b[2m" in chat.transcript  # notes are dim
        assert chat.leave() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "Be loud."
    assert messages[3]["content"] == "one\n  two"
    assert "/save talk.json" in (tmp_path / ".local/state/octavo/history").read_text().splitlines()


# promise: word-model-question
def test_at_a_terminal_a_single_word_is_asked_about(tmp_path: Path) -> None:
    env = {**FAKE, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    words = ("run", "mistral", "--max-tokens", "3")
    question = r"mistral may be a model or a question.\r\n  m  open the model mistralai/Mistral-7B-Instruct-v0.3\r\n  q  .*\r\nm or q\? "
    for typed, code, said in (
        ("yes\rm\r", 1, "error: mistralai/Mistral-7B-Instruct-v0.3: not complete in the cache"),
        ("q\r", 0, r"\x1b\[K[^o]"),  # an answer
        ("\x04", 2, "error: mistral may be a model or a question; write one of these"),
    ):
        with Typist(*words, cwd=tmp_path, env=env) as asked:
            asked.expect(question)
            asked.type(typed)
            asked.expect(said)
            assert asked.process.wait(SECONDS) == code


# promise: environment-color, chat-ctrl-c, chat-history-survives, chat-ends
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    history = tmp_path / ".local/state/octavo/history"
    history.parent.mkdir(parents=True)
    history.write_text("asked in an earlier run\n")
    with Typist("chat", cwd=tmp_path, env={**SLOW, "HOME": str(tmp_path), "NO_COLOR": "1"}) as chat:
        chat.expect(">>> ")
        chat.type("half a line")
        chat.expect("half a line")
        chat.interrupt()
        chat.type("Talk until the context is full\r")
        chat.expect(r"full\r\n.+")  # it streams: the first words are here, thousands are to come
        assert "stopped" in chat.interrupt()
        count = re.search(r"answer  (\d+) tokens", chat.ask("/stats"))
        assert count and 1 <= int(count[1]) < 8000
        assert "\x1b[2m" not in chat.transcript
        chat.type("\x1b[A" * 3)  # what was typed in the earlier run is two answers up
        chat.expect("asked in an earlier run")
        chat.interrupt()
        assert chat.leave("/quit\r") == 0


# promise: chat-full-context, chat-ends
def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(tmp_path: Path) -> None:
    words = ("--max-tokens", "8", "--max-model-len", "160")
    with Typist("chat", *words, cwd=tmp_path, env={**FAKE, "HOME": str(tmp_path)}) as chat:
        chat.expect(">>> ")
        said = [chat.ask(f"Number {number}, please") for number in range(8)]
        assert any("the context of 160 tokens is full: the oldest turn is left out" in text for text in said)
        assert not any("error" in text for text in said)
        assert "maximum context length is 160 tokens" in chat.ask("far too long " * 200)
        assert "error" not in chat.ask("And a short one")
        assert chat.leave("/exit\r") == 0


# promise: chat-generate-log, progress-bar-tokens
def test_generate_at_a_terminal_shows_one_line_at_a_time_and_clears_it(tmp_path: Path) -> None:
    words = ("generate", "One", "Two", "--max-tokens", "1500", "--output", "out.jsonl")
    with Typist(*words, cwd=tmp_path, env={**FAKE, "TERM": "xterm"}) as batch:
        assert batch.expect(r"\r\x1b\[K") == "loading the default model ...\r\x1b[K"
        assert "\n" not in batch.expect(r"generating [^\r]*\d/2[^\r]* in \d+ tok/s, out [1-9]\d* tok/s")
        batch.expect(r"\x1b\[1A\x1b\[2K")  # up and gone
        assert batch.process.wait(SECONDS) == 0
    assert [json.loads(line)["prompt"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["One", "Two"]


# promise: octavo-generate-streams
def test_generate_at_a_terminal_streams_and_ctrl_c_keeps_what_came(tmp_path: Path) -> None:
    with Typist("generate", "One", "Two", "--max-tokens", "4000", "--seed", "1", cwd=tmp_path, env={**FAKE, "TERM": "xterm"}) as batch:
        batch.expect(r"\r\x1b\[K\S")  # the first text is here, thousands of tokens are to come
        batch.type("\x03")
        assert batch.process.wait(SECONDS) == 130
        assert "tok/s" not in batch.transcript and "Traceback" not in batch.transcript
