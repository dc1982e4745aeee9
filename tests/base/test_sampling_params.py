"""`SamplingParams`: what makes no sense is refused by the name of the field, whatever way Python is started."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from tests.cli.processes import ROOT, environment

NAN, INF = math.nan, math.inf
NO_NUMBERS: list[Any] = [NAN, INF, -INF, "1", True, None, [1.0]]
NO_INTEGERS: list[Any] = [1.5, 2.0, "5", True, NAN, [1]]

TAG: dict[str, Any] = {"structures": [{"begin": "<call>", "schema": {}, "end": "</call>"}], "triggers": ["<call"]}

BAD: dict[str, list[Any]] = {
    "n": [0, -1, None, *NO_INTEGERS],
    "temperature": [-0.1, 10**400, 1e39, *NO_NUMBERS],
    "top_p": [0, -1, 1.01, *NO_NUMBERS],
    "top_k": [-2, 2**63, None, *NO_INTEGERS],
    "min_p": [-0.1, 1.1, *NO_NUMBERS],
    "seed": [-1, 2**64, *NO_INTEGERS],
    "presence_penalty": [-2.1, 2.1, *NO_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NO_NUMBERS],
    "repetition_penalty": [0, -1, 1e39, 1e-39, 10**39, *NO_NUMBERS],
    "stop": ["", ["a", ""], [1], 5, {"a": 1}, [["a"]], b"a"],
    "stop_token_ids": [[-1], [1.5], ["1"], [True], 5, "12", {1}],
    "ignore_eos": [1, "false", None],
    "logit_bias": [
        5, [1], {"abc": 1.0}, {-1: 1.0}, {1.5: 1.0}, {True: 1.0}, {"-1": 1.0}, {1: NAN}, {1: INF}, {1: "2"}, {"9" * 400: 1.0},
        {1: 1e39}, {1: -1e39}, {1: 10**400},
    ],
    "allowed_token_ids": [[], [-1], [1.5], ["1"], [True], 5, "12"],
    "bad_words": ["", ["a", ""], [1], 5, {"a": 1}, [["a"]], b"a"],
    "detokenize": [1, "false", None],
    "skip_special_tokens": [0, "true", None],
    "include_stop_str_in_output": [1, "false", None],
    "max_tokens": [0, -1, 2**63, *NO_INTEGERS],
    "min_tokens": [-1, 17, 2**63, None, *NO_INTEGERS],
    "structured_outputs": [
        5, "json", [], {}, {"json": "{}", "regex": "a"}, {"json": ""}, {"json": "[]"}, {"json": [1]}, {"json": {"a": NAN}},
        {"json": {"a": {1}}}, {"json": '{"a":' * 10**5}, {"json_object": 1}, {"json_object": False}, {"regex": ""}, {"regex": "a\0"},
        {"regex": 5}, {"choice": []}, {"choice": "ab"}, {"choice": ["a", ""]}, {"choice": ["a", 5]}, {"grammar": "\ud83d"},
        {"grammar": None}, {"xml": "a"}, {"x" * 999: 1}, {"regex": "a" * 200_001}, {"json": '{"a":' + " " * 200_000 + "1}"},
        {"structural_tag": TAG | {"triggers": []}}, {"structural_tag": TAG | {"triggers": ["<other"]}}, {"structural_tag": "[]"},
        {"structural_tag": {"type": "structural_tag", "format": {}}}, {"structural_tag": TAG | {"structures": [{"begin": "<call>"}]}},
        {"structural_tag": TAG | {"structures": TAG["structures"] * 129}}, {"regex": "a", "whitespace_pattern": " "},
        {"json": {"enum": [1] * 100_000}}, {"json": {"a" * 200_001: 1}}, {"choice": ["a"] * 10_001}, {"choice": ["a" * 999] * 999},
    ],
    "output_kind": [0, "DELTA", None],
    "logprobs": [-1, -2, "x", 1.0, True],
    "prompt_logprobs": [-1, -2, "x", 1.0, True],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda value: repr(value)[:20])
def test_a_value_without_meaning_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} (must be|is|needs|has|json|regex|choice|grammar|structural_tag)") as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.param == name and isinstance(refusal.value, ValueError)
    assert len(str(refusal.value)) < 200, "a huge value is not repeated"


def test_a_schema_that_comes_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with every prompt of a request, on its way into the engine."""
    reads, loads = list[str](), json.loads

    def read(text: str) -> Any:
        reads.append(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", read)
    text = json.dumps({"enum": list(range(20_000))})
    assert len({StructuredOutputsParams(json=text) for _ in range(16)}) == 1 and len(reads) == 1


def test_every_field_a_user_can_set_is_checked() -> None:
    settable = {name for name, field in SamplingParams.__dataclass_fields__.items() if field.init}
    assert set(BAD) == settable


UNDER_O = """
import sys
from tests.base.test_sampling_params import CASES
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
assert False, "this line must be off"
for name, value in CASES:
    try:
        SamplingParams(**{name: value})
    except ValueError as error:
        if error.param != name:
            sys.exit(f"{name}={value!r}: {error}")
    else:
        sys.exit(f"{name}={value!r} was taken")
print(len(CASES))
"""


def test_the_same_is_refused_where_asserts_are_off() -> None:
    run = subprocess.run([sys.executable, "-O", "-c", UNDER_O], cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == (f"{len(CASES)}\n", "")


def test_values_at_the_edges_are_taken() -> None:
    taken: dict[str, list[Any]] = {
        "n": [1, 128], "temperature": [0, 0.0, 1e-50, 1e-9, 100, 3.4e38], "top_p": [1, 1.0, 1e-9],
        "top_k": [-1, 0, 1, 2**31 - 1], "min_p": [0, 1], "seed": [None, 0, 2**64 - 1], "presence_penalty": [-2, 2],
        "frequency_penalty": [-2.0, 2.0], "repetition_penalty": [1.2e-38, 1e-3, 50, 3.4e38],
        "max_tokens": [None, 1, 2**31 - 1], "min_tokens": [0, 16], "logprobs": [None, 0, 10**6], "stop_token_ids": [None, [], [0, 2**40]],
        "logit_bias": [None, {}, {1: 3.4e38, 2: -3.4e38, 3: 1e-300}],
        "structured_outputs": [{"structural_tag": TAG}, {"structural_tag": json.dumps(TAG)}, {"choice": ["a"], "json_object": None}],
    }  # fmt: skip
    for name, values in taken.items():
        for value in values:
            SamplingParams(**{name: value})


# promise: samplingparams-clone
def test_an_assignment_is_checked_like_the_construction_and_a_clone_is_independent() -> None:
    params = SamplingParams(temperature=0.5, max_tokens=20, logit_bias={1: 2.0})
    clone = params.clone()
    clone.temperature, clone.stop, clone.logit_bias = 0, "end", {"3": 1}  # type: ignore[assignment, dict-item]
    assert (clone.greedy, clone.stop, clone.logit_bias, clone.max_tokens) == (True, ("end",), {3: 1.0}, 20)
    assert params == SamplingParams(temperature=0.5, max_tokens=20, logit_bias={1: 2.0})
    for name, value in (("top_p", 7), ("min_tokens", 21), ("n", "2")):
        with pytest.raises(RequestError, match=f"^{name} (must be|is)"):
            setattr(clone, name, value)
    with pytest.raises(TypeError, match="no field 'max_token'; did you mean max_tokens"):
        clone.max_token = 5  # type: ignore[attr-defined]
    assert clone == SamplingParams(temperature=0, stop="end", logit_bias={3: 1.0}, max_tokens=20), "what was refused has changed nothing"
    assert params.clone().for_chat() == params and SamplingParams().clone().for_chat().max_tokens is None


def test_stops_come_in_several_forms_and_are_kept_as_tuples() -> None:
    stops: list[Any] = [None, "ab", ["ab", "c"], ("ab",), []]
    assert [SamplingParams(stop=stop).stop for stop in stops] == [(), ("ab",), ("ab", "c"), ("ab",), ()]
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]


def test_only_a_temperature_of_zero_is_greedy() -> None:
    assert [SamplingParams(temperature=value).greedy for value in (0, 0.0, -0.0, 1e-9, 1)] == [True, True, True, False, False]


def test_a_minimum_above_the_maximum_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="min_tokens is 9, above max_tokens 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    SamplingParams(min_tokens=10**6, max_tokens=None)


# promise: chat-defaults-max
def test_chat_takes_the_rest_of_the_context_unless_a_length_was_given() -> None:
    assert SamplingParams().max_tokens == 16
    assert SamplingParams(temperature=0.5).for_chat().max_tokens is None
    assert SamplingParams(max_tokens=16).for_chat().max_tokens == 16
    assert replace(SamplingParams(), n=2).for_chat().max_tokens is None, "a copy knows what was not set"
    assert SamplingParams(max_tokens=None).for_chat().max_tokens is None


def test_a_bias_may_have_text_keys_as_json_has_them() -> None:
    assert SamplingParams(logit_bias={"12": 3, 7: -0.5}).logit_bias == {12: 3.0, 7: -0.5}


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(RequestError, match="detokenize is false; use stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)
