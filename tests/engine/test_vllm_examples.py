"""Programs in the form of vLLM's examples run here with nothing changed but the import and the name of the model."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

MODEL = "facebook/opt-125m"

QUICKSTART = """
from vllm import LLM, SamplingParams

prompts = [
    "Once upon a time",
    "The capital of France is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

by_name = llm.generate(prompts=prompts[0], sampling_params=sampling_params, use_tqdm=False)
"""

CHAT = """
from vllm import LLM, EngineArgs
from vllm.outputs import RequestOutput

from dataclasses import asdict

llm = LLM(**asdict(EngineArgs(model="facebook/opt-125m", max_model_len=256)))

sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 8
sampling_params.temperature = 0.0

def print_outputs(outputs: list[RequestOutput]):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")

conversation = [
    {"role": "system", "content": "You are a helpful assistant. "},
    {"role": "user", "content": "Hello. "},
    {"role": "assistant", "content": "Hello! How can I assist you today? "},
    {"role": "user", "content": "Once upon a time"},
]
one = llm.chat(conversation, sampling_params, use_tqdm=False)
print_outputs(one)

conversations = [conversation for _ in range(3)]
several = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True)
print_outputs(several)

chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
by_template = llm.chat(conversations, sampling_params, use_tqdm=False, chat_template=chat_template)
print_outputs(by_template)
"""

TOOLS = """
from vllm import LLM
from vllm.sampling_params import SamplingParams

llm = LLM(model="facebook/opt-125m")
sampling_params = SamplingParams(max_tokens=8, temperature=0.0)
tools = [{
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}]
messages = [{"role": "user", "content": "Can you tell me what the weather is in Dallas?"}]
outputs = llm.chat(messages, sampling_params=sampling_params, tools=tools, chat_template_kwargs={"enable_thinking": False})
output = outputs[0].outputs[0].text.strip()

template = "{% for m in messages %}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}A:{% endif %}{{ enable_thinking }}"
messages.append({"role": "assistant", "content": "It is"})
prompts = [
    llm.chat(messages, sampling_params, chat_template=template, **rest)[0].prompt
    for rest in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    )
]
"""

STRUCTURED_OUTPUTS = """
from enum import Enum

from pydantic import BaseModel

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 450

structured_outputs_params_choice = StructuredOutputsParams(choice=["Positive", "Negative"])
sampling_params_choice = SamplingParams(structured_outputs=structured_outputs_params_choice)
prompt_choice = "Classify this sentiment: it is wonderful!"

structured_outputs_params_regex = StructuredOutputsParams(regex=r"[a-z]{1,9}@[a-z]{1,9}\\.com\\n")
sampling_params_regex = SamplingParams(structured_outputs=structured_outputs_params_regex, stop=["\\n"], max_tokens=MAX_TOKENS)
prompt_regex = "Generate an email address for Alan Turing"

class CarType(str, Enum):
    SEDAN = "SEDAN"
    SUV = "SUV"

class CarDescription(BaseModel, extra="forbid"):
    car_type: CarType
    doors: CarType

json_schema = CarDescription.model_json_schema()
structured_outputs_params_json = StructuredOutputsParams(json=json_schema)
sampling_params_json = SamplingParams(structured_outputs=structured_outputs_params_json, max_tokens=MAX_TOKENS)
prompt_json = "Generate a JSON with the type of the most iconic car"

simplified_sql_grammar = '''
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
'''
structured_outputs_params_grammar = StructuredOutputsParams(grammar=simplified_sql_grammar)
sampling_params_grammar = SamplingParams(structured_outputs=structured_outputs_params_grammar, max_tokens=MAX_TOKENS)
prompt_grammar = "Generate an SQL query"

sampling_params_object = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
prompt_object = "Generate any JSON"


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM):
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    return outputs[0].outputs[0].text


llm = LLM(model="facebook/opt-125m", max_model_len=512)
choice_output = generate_output(prompt_choice, sampling_params_choice, llm)
regex_output = generate_output(prompt_regex, sampling_params_regex, llm)
json_output = generate_output(prompt_json, sampling_params_json, llm)
grammar_output = generate_output(prompt_grammar, sampling_params_grammar, llm)
object_output = generate_output(prompt_object, sampling_params_object, llm)
"""

BEAM_SEARCH = """
from vllm import LLM, TokensPrompt
from vllm.inputs import TextPrompt
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="facebook/opt-125m")
params = BeamSearchParams(beam_width=3, max_tokens=10)
outputs = llm.beam_search([{"prompt": "Once upon a time"}], params)
for output in outputs:
    for sequence in output.sequences:
        print(f"Generated text: {sequence.text!r}, {sequence.cum_logprob}")

ids = llm.get_tokenizer().encode("Once upon a time")
by_ids = llm.beam_search([TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt="Once upon a time")], params, use_tqdm=False)
"""

METRICS = """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram

llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(["Once upon a time", "One day, a cat"], SamplingParams(max_tokens=6, ignore_eos=True))

found = {}
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        found[metric.name] = metric.value
    elif isinstance(metric, Counter):
        found[metric.name] = metric.value
    elif isinstance(metric, Histogram):
        found[metric.name] = (metric.count, metric.sum, list(metric.buckets.items())[-1])
"""

ASYNC_STREAMING = """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

texts = {}


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=12,
        temperature=0.8,
        top_p=0.95,
        seed=42,
        output_kind=RequestOutputKind.DELTA,
    )
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            new_text = completion.text
            if new_text:
                print(new_text, end="", flush=True)
                texts.setdefault(output.request_id, []).append(new_text)
        if output.finished:
            break


async def main():
    engine_args = AsyncEngineArgs(
        model="facebook/opt-125m",
        enforce_eager=True,
    )
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        for i, prompt in enumerate(["Once upon a time", "One day, a cat"], 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def run_example(stories: str, tmp_path: Path) -> Any:
    """Runs a program as a script, with the import and the model's name changed. Returns its variables."""

    def run(source: str) -> dict[str, Any]:
        changed = re.sub(r"^from vllm\.v1\.metrics\.reader import", "from octavo.metrics import", source, flags=re.MULTILINE)
        changed = re.sub(r"^from vllm[\w.]* import", "from octavo import", changed, flags=re.MULTILINE)
        assert changed.count(MODEL) == 1
        (tmp_path / "example.py").write_text(changed.replace(MODEL, stories))
        return runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")

    return run


# promise: vllm-examples
def test_the_quickstart_runs(run_example: Any) -> None:
    found = run_example(QUICKSTART)
    prompts = [output.prompt for output in found["outputs"] + found["by_name"]]
    assert prompts == ["Once upon a time", "The capital of France is", "Once upon a time"]
    assert all(0 < len(output.outputs[0].token_ids) <= 16 and output.finished for output in found["outputs"])


# promise: vllm-examples, get-default-sampling-params
def test_the_chat_example_runs(run_example: Any) -> None:
    found = run_example(CHAT)
    assert {output.outputs[0].text for output in found["one"] + found["several"]} == {found["one"][0].outputs[0].text}
    assert len(found["several"]) == 3 and len(found["one"][0].outputs[0].token_ids) == 8
    assert found["one"][0].prompt.startswith("<s>You are a helpful assistant. Hello. ")
    assert found["by_template"][0].prompt.startswith("[You are a helpful assistant. ][Hello. ]")
    assert found["by_template"][2].prompt.endswith("[Once upon a time]A:")


# promise: vllm-examples, chat-tools
def test_a_chat_with_tools_and_options_of_the_template_runs(run_example: Any) -> None:
    found = run_example(TOOLS)
    assert found["outputs"][0].prompt.startswith("<s>Tools: ")
    question = "Can you tell me what the weather is in Dallas?."
    assert found["prompts"] == [f"{question}It is.A:False", f"{question}It is.", f"{question}It is"]


# promise: vllm-examples, structured-outputs-params
def test_the_structured_outputs_examples_run(run_example: Any) -> None:
    found = run_example(STRUCTURED_OUTPUTS)
    assert found["choice_output"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{1,9}@[a-z]{1,9}\.com", found["regex_output"])
    assert found["CarDescription"].model_validate_json(found["json_output"])
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", found["grammar_output"])
    assert found["object_output"].startswith("{")


# promise: vllm-examples, beam-search
def test_the_beam_search_example_runs(run_example: Any) -> None:
    found = run_example(BEAM_SEARCH)
    texts = [[sequence.text for sequence in output.sequences] for output in found["outputs"] + found["by_ids"]]
    assert len(texts) == 3 and texts[0] == texts[2] and texts[0][0].startswith("Once upon a time,") and len(set(texts[0])) == 3
    scores = [sequence.cum_logprob for sequence in found["outputs"][0].sequences]
    assert scores == sorted(scores, reverse=True)


# promise: vllm-examples, get-metrics
def test_the_metrics_example_runs(run_example: Any) -> None:
    found = run_example(METRICS)
    tokens = sum(len(output.prompt_token_ids) for output in found["outputs"])
    assert found["found"]["octavo:prompt_tokens"] == tokens and found["found"]["octavo:generation_tokens"] == 12
    assert found["found"]["octavo:num_requests_running"] == found["found"]["octavo:kv_cache_usage_perc"] == 0
    count, total, last = found["found"]["octavo:iteration_tokens_total"]
    assert total == tokens + 10 and last == ("+Inf", count)


# promise: vllm-examples, async-llm
def test_the_async_streaming_example_runs(run_example: Any, stories: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_example(ASYNC_STREAMING)
    assert list(found["texts"]) == ["stream-example-1", "stream-example-2"]
    with LLM(stories, enforce_eager=True) as llm:
        offline = llm.generate(["Once upon a time", "One day, a cat"], SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=42))
    assert ["".join(pieces) for pieces in found["texts"].values()] == [output.outputs[0].text for output in offline]
    assert capsys.readouterr().out == "".join(piece for pieces in found["texts"].values() for piece in pieces)
