"""The commands as scripts use them: text on stdout, one line on stderr, an exit code."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import COMMANDS
from octavo.engine.core import EngineCore
from octavo.messages import AddRequest
from octavo.text.conversation import common_length
from tests.cli.processes import FAKE, ROOT, SECONDS, SLOW, environment, octavo, octavo_here
from tests.support.hybrids import hybrid_story_folder
from tests.support.story_folder import story_folder


def test_help_lists_the_commands_that_exist_and_no_others() -> None:
    run = octavo("--help")
    listed = [line.split()[0] for line in run.stdout.partition("commands:")[2].splitlines() if line.startswith("    ")]
    assert run.returncode == 0
    assert listed == list(COMMANDS)
    for name in COMMANDS:
        assert octavo_here(name, "--help").stdout.startswith(f"usage: octavo {name} ")


# promise: octavo-chat, model-existing-gguf, model-nothing-default, linux-x86-64, chat-generate-log, octavo-run-octavo
def test_the_default_model_answers_once_with_text_alone() -> None:
    run = octavo("run", "smollm2-135m-instruct", "What is the capital of Japan?", "--temperature", "0", "--max-tokens", "8")
    assert (run.stdout, run.stderr, run.returncode) == ("The capital of Japan is Tokyo.\n", "", 0)


# promise: model-existing-folder, max-model-len, logs-go-stderr, octavo-chat-model, without-params-max
def test_a_named_model_answers_once_to_the_end_of_its_context(tmp_path: Path) -> None:
    words = ("chat", str(story_folder(tmp_path / "stories", end_ids=[])), "Once upon a time", "--temperature", "0", "--max-model-len", "64")
    run = octavo(*words, env={"OCTAVO_LOG_LEVEL": "INFO"})
    assert run.returncode == 0
    assert run.stdout.startswith(", there was a little girl named Lily. She loved to play outside") and run.stdout.endswith("\n")
    assert len(run.stdout) > 120  # 58 tokens: far more than the 16 that a completion gets
    assert "INFO" not in run.stdout and "init engine took" in run.stderr  # logs are on stderr


# promise: echo-octavo-chat
def test_a_question_on_stdin_is_answered_once() -> None:
    run = octavo("chat", "--max-tokens", "4", stdin="What is it?\n", env=FAKE)
    assert run.stdout.strip() and run.stdout.endswith("\n")
    assert (run.stderr, run.returncode) == ("", 0)


# promise: device-mps-refused, what-built-does, wrong-command-option
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--versoin"], 2, "octavo: error: unknown option --versoin; did you mean --version?"),
        (["generat"], 2, "octavo: error: unknown command generat; did you mean generate?"),
        (["chat", "--max-modle-len", "4k", "Hi"], 2, "octavo chat: error: unknown option --max-modle-len; did you mean --max-model-len?"),
        (["server"], 2, "octavo: error: unknown command server; did you mean serve?"),
        (["--model", "x", "chat"], 2, "octavo: error: unknown option --model; options come after the command: octavo chat --model"),
        (["owner/name"], 2, "octavo: error: unknown command owner/name; a model comes after a command: octavo serve owner/name"),
        (["run", "--temp", "0.5", "Hi"], 2, "octavo run: error: unknown option --temp; did you mean --temperature?"),
        (["generate", "-ngl", "99", "Hi"], 2, "octavo generate: error: unknown option -ngl; not needed: a GPU computes the whole model"),
        (["serve", "--temp=0.5"], 2, "octavo serve: error: unknown option --temp; each request sets it"),
        (["chat", "--max-model", "4k"], 2, "octavo chat: error: unknown option --max-model; did you mean --max-model-len?"),
        (["chat", "--dtype", "fp16", "Hi"], 2, "choose from auto, float32, bfloat16, float16); did you mean float16?"),
        (["serve", "llama3.2:1b"], 1, "'llama3.2:1b' is not on this machine; did you mean meta-llama/Llama-3.2-1B-Instruct, its name on"),
        (["pull", "qwen3:0.6b"], 1, "octavo: error: 'qwen3:0.6b' is not on this machine; did you mean Qwen/Qwen3-0.6B, its name on the"),
        (["chat", "mistral", "Hi"], 1, "did you mean mistralai/Mistral-7B-Instruct-v0.3, its name on the hub?"),
        (["qwen3:0.6b"], 2, "unknown command qwen3:0.6b; a model comes after a command: octavo serve Qwen/Qwen3-0.6B"),
        (["generate", "mistral"], 2, "mistral is the name of a model, not a prompt: octavo generate --model mistralai/Mistral-7B"),
        (["pull", "/"], 1, "octavo: error: / is not a model: a model is a .gguf file, or a folder with config.json, model.safetensors"),
        (["pull", ".."], 1, "octavo: error: .. is not a model: a model is a .gguf file, or a folder with config.json, model.safetensors"),
        (["rm", "/"], 1, "octavo: error: '/' is not a downloaded model: give owner/name[:QUANT], as `octavo list` shows it"),
        (["rm", "mistral"], 1, "'mistral' is not a downloaded model; did you mean mistralai/Mistral-7B-Instruct-v0.3?"),
        (["list", "nonsense"], 2, "octavo list: error: unexpected word nonsense"),
        (["chat", "localhost:9", "--url", "localhost:8", "Hi"], 2, "two servers, localhost:9 and --url localhost:8; give one"),
        (["chat", "--kv-cache-memory-bytes", "4q"], 2, "must be a size like 4096, 32k, 512m, 1.5g, 24GiB or auto, got '4q'"),
        (["chat", "--scheduling-policy", "lifo"], 2, "invalid choice: 'lifo'"),
        (["chat", "--device", "mps"], 2, "invalid choice: 'mps' (choose from auto, cpu, cuda): Octavo runs on a CPU or an NVIDIA GPU"),
        (["chat", "what", "is", "it?"], 2, "put the question in quotes"),
        (["generate"], 2, "give prompts as words, or a file of prompts with --file"),
        (["generate", "--file", "p.txt", "Hello"], 2, "give prompts as words, or a file of prompts with --file"),
        (["chat", "models/absent.gguf", "Hello?"], 1, "octavo: error: 'models/absent.gguf' not found"),
        (["chat", "--temperature", "-1", "Hello!"], 1, "octavo: error: temperature must be a finite number of at least 0, got -1.0"),
        (["generate", "-n", "0", "Hello"], 1, "octavo: error: n must be an integer of at least 1, got 0"),
        (["chat", "--block-size", "12", "Hello!"], 1, "octavo: error: block_size must be a power of two from 1 to 256, got 12"),
        (["generate", "--file", "absent.txt"], 1, "octavo: error: absent.txt: No such file or directory"),
        (["generate", "Hello", "--output", "absent/out.jsonl"], 1, "octavo: error: --output absent/out.jsonl cannot be written"),
        (["chat"], 1, "octavo: error: the question is empty"),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(words: list[str], code: int, said: str) -> None:
    run = octavo_here(*words)
    assert run.returncode == code
    assert run.stdout == ""
    assert said in run.stderr.splitlines()[0]
    assert len(run.stderr.splitlines()) == code  # a mistake of usage is followed by where to read more


# promise: folder-not-model
def test_a_folder_needs_no_pull_if_it_is_a_model_and_is_refused_if_not(tmp_path: Path) -> None:
    folder = story_folder(tmp_path / "stories")
    run = octavo_here("pull", str(folder))
    assert (run.returncode, run.stdout) == (0, f"stories is on this machine already, in {folder}\n")
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    run = octavo_here("pull", str(folder))
    assert (run.returncode, run.stdout) == (1, "") and "architectures is ['BertModel']; supported: " in run.stderr
    (folder / "config.json").unlink()
    assert octavo_here("pull", str(folder)).stderr.endswith("this folder lacks config.json\n")


# promise: word-model-question
@pytest.mark.parametrize(
    ("words", "word", "model", "question"),
    [
        (["run", "mistral"], "mistral", "octavo run mistralai/Mistral-7B-Instruct-v0.3", "octavo run SmolLM2-135M-Instruct mistral"),
        (["chat", "phi4", "--seed", "1"], "phi4", "octavo chat microsoft/phi-4", "octavo chat SmolLM2-135M-Instruct phi4"),
        (["run", "hello"], "hello", "octavo run OWNER/hello", "octavo run SmolLM2-135M-Instruct hello"),
        (["run", "x:9", "hello"], "hello", "octavo run --url x:9 --model hello", "echo hello | octavo run --url x:9"),
    ],
)
def test_a_single_word_is_no_question_where_nobody_can_be_asked(words: list[str], word: str, model: str, question: str) -> None:
    run = octavo_here(*words, stdin="What is it?")
    assert (run.returncode, run.stdout) == (2, "")
    first, *commands, _ = run.stderr.splitlines()
    assert first == f"octavo {words[0]}: error: {word} may be a model or a question; write one of these"
    assert [re.split(r"  +", line.strip()) for line in commands] == [[model, "the model"], [question, "the question"]]


@pytest.mark.parametrize("words", [["chat", "--max-modle-len", "4k", "Hi"], ["chat", "--block-size", "12", "Hello!"], ["chat"]], ids=str)
def test_a_process_says_of_it_no_more_and_no_less(words: list[str]) -> None:
    run, here = octavo(*words), octavo_here(*words)
    assert run.returncode > 0 and run.stderr.count("octavo") > 0
    assert (run.returncode, run.stdout, run.stderr) == (here.returncode, here.stdout, here.stderr)


def test_chats_of_generate_name_the_ends_of_their_messages_to_a_model_that_keeps_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, added, add = hybrid_story_folder(tmp_path / "model"), tmp_path / "p.jsonl", list[AddRequest](), EngineCore.add
    system = {"role": "system", "content": "Once upon a time there was a dog. " * 3}
    chats = [{"messages": [system, {"role": "user", "content": question}]} for question in ("Who?", "Tim?")]
    file.write_text("\n".join(json.dumps(line) for line in [*chats, {"prompt": "Once"}]))
    monkeypatch.setattr(EngineCore, "add", lambda core, request: (added.append(request), add(core, request)))
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=fake")
    settings = ("--load-format", "dummy", "--num-gpu-blocks-override", "90", "--max-num-seqs", "4")
    output = ("--max-tokens", "2", "--output", str(tmp_path / "out.jsonl"))
    run = octavo_here("generate", "--model", str(folder), "--file", str(file), *output, *settings)
    assert run.returncode == 0, run.stderr
    one, other, plain = added
    common = common_length(one.prompt_token_ids, other.prompt_token_ids)
    assert common > 16 and one.checkpoints[0] == other.checkpoints[0] == common and plain.checkpoints == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ('["a"]', 'must be an object with "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'must be an object with "prompt" or "messages"'),
        ('{"prompt": "a", "max_token": 4}', "unknown field 'max_token'; did you mean max_tokens?"),
        ('{"prompt": "a", "top_p": 1.5}', "top_p must be a finite number above 0 and at most 1, got 1.5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    run = octavo_here("generate", "--file", "p.jsonl")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("octavo: error: p.jsonl line 3: ") and said in run.stderr


# promise: octavo-generate-file
def test_a_prompt_too_long_for_the_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("fine\n" + "word " * 200 + "\n")
    run = octavo("generate", "--file", "p.txt", "--max-model-len", "64", cwd=tmp_path, env=FAKE)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("octavo: error: p.txt line 2: This model's maximum context length is 64 tokens")
    assert len(run.stderr.splitlines()) == 1


# promise: octavo-generate, octavo-generate-file, octavo-generate-output, cached-tokens-always
def test_a_file_of_prompts_becomes_a_file_of_outputs(tmp_path: Path) -> None:
    shared = "The same long beginning of two quite different prompts, which is longer than one block of sixteen tokens, "
    lines = [
        {"prompt": shared + "and then this", "n": 2},
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0},
        {"prompt": shared + "or that", "seed": 7},
    ]
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    run = octavo("generate", "--file", "in.jsonl", "--output", "out.jsonl", "--max-tokens", "5", cwd=tmp_path, env=FAKE)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line, record in zip(lines, records, strict=True):
        assert {key: record[key] for key in ("prompt", "messages") if key in record}.items() <= line.items()
    assert [[sample["tokens"] for sample in record["outputs"]] for record in records] == [[5, 5], [3], [5]]
    assert [record["usage"]["completion_tokens"] for record in records] == [10, 3, 5]
    assert records[2]["usage"]["cached_tokens"] == 16 < records[2]["usage"]["prompt_tokens"]
    assert all(sample["finish_reason"] == "length" and sample["text"] for record in records for sample in record["outputs"])


# promise: chat-defaults-max
def test_messages_of_a_file_are_answered_to_the_end_of_the_context(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello"}]}
    lines = [asked | {"temperature": 0.5, "ignore_eos": True}, {"prompt": "Hello", "ignore_eos": True}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = octavo("generate", "--file", "in.jsonl", "--output", "-", "--max-model-len", "96", cwd=tmp_path, env=FAKE)
    chat, plain = (json.loads(line)["usage"] for line in run.stdout.splitlines())
    assert chat["prompt_tokens"] + chat["completion_tokens"] == 96 and plain["completion_tokens"] == 16


# promise: octavo-generate
def test_texts_go_to_stdout_apart_from_each_other() -> None:
    run = octavo("generate", "--max-tokens", "4", "--file", "-", stdin="One\nTwo\n\nThree\n", env=FAKE)
    assert run.returncode == 0
    assert run.stdout.count("\n---\n") == 2


# promise: chat-generate-log, octavo-generate-prompt
def test_prompts_may_be_words_and_what_is_wrong_with_the_environment_is_said_on_stderr() -> None:
    run = octavo("generate", "One", "--max-tokens", "4", "Two", env={"OCTAVO_DEBUG": "runner=fake"})
    assert run.returncode == 0
    assert run.stdout.count("\n---\n") == 1 and "OCTAVO_DEBUG" not in run.stdout
    assert len(run.stderr.splitlines()) == 1 and run.stderr.endswith("WARNING OCTAVO_DEBUG is set, for tests only: runner=fake\n")


def test_a_failing_engine_is_an_error_of_the_command() -> None:
    run = octavo("chat", "Hello!", env={"OCTAVO_DEBUG": "runner=fake,forward.raise@3", "OCTAVO_LOG_LEVEL": "ERROR"})
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("octavo: error: the engine failed in this step")


# promise: environment-octavo-log
@pytest.mark.soak
def test_a_traceback_comes_only_when_asked_for() -> None:
    words = ("chat", "--block-size", "12", "Hello!")
    assert "Traceback" not in octavo(*words).stderr
    assert "Traceback" in octavo(*words, env={"OCTAVO_LOG_LEVEL": "DEBUG"}).stderr


@pytest.mark.parametrize("words", [["chat", "Talk on and on"], ["generate", "Talk on and on", "And on", "--max-tokens", "4000"]])
def test_ctrl_c_ends_a_script_quietly(words: list[str]) -> None:
    command = [sys.executable, "-m", "octavo", *words]
    with subprocess.Popen(command, env=environment(SLOW), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None and process.stdout.read(1)  # it streams: thousands of tokens are to come
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        assert (err, process.returncode) == (b"", 130)
        assert out.endswith(b"\n") or words[0] == "chat"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m octavo chat 'Talk on and on' | head -c 20; code=${{PIPESTATUS[0]}}; echo; echo $code"
    run = subprocess.run(["bash", "-c", command], env=environment(FAKE), capture_output=True, timeout=SECONDS)
    assert run.stdout.splitlines()[-1] == b"141"  # bytes: the reader may leave in the middle of a character
    assert run.stderr == b""


def test_the_demo_shows_the_shared_prefix_in_the_cache() -> None:
    command = [sys.executable, str(ROOT / "examples/demo.py")]
    run = subprocess.run(command, env=environment(FAKE), capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" 176  differs") == 7
    assert "1280 of 1731 prompt tokens came from the cache" in run.stdout


def test_commands_log_warnings_alone_unless_asked_for_more(tmp_path: Path) -> None:
    words = ("generate", "Hello", "--max-tokens", "2", "--model", str(story_folder(tmp_path / "stories")))
    quiet, loud = octavo(*words), octavo(*words, env={"OCTAVO_LOG_LEVEL": "INFO"})
    assert (quiet.returncode, loud.returncode) == (0, 0)
    assert quiet.stderr == "" and "KV cache size" in loud.stderr


def test_input_that_is_not_utf8_and_counts_without_meaning_are_refused_in_a_line() -> None:
    command = [sys.executable, "-m", "octavo", "chat"]
    done = subprocess.run(command, input=b"\xff\xfe", cwd=ROOT, env=environment(FAKE), capture_output=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (1, b"octavo: error: stdin is not UTF-8 text (byte 0)\n")
    for count in ("4", "-5", "10000000000000", "many"):
        refused = octavo_here("verify", f"--requests={count}")
        assert refused.returncode == 2 and f"--requests: must be a number from 12 to 100000, got '{count}'" in refused.stderr
        assert "fewer than 12 may not cause a prefix hit" in refused.stderr
