"""Templates render as Hugging Face renders them, and a hostile one is stopped: in time, in memory, with one short line."""

import json
import threading
import time
import tracemalloc
from typing import Any

import pytest

from octavo.errors import RequestError, TemplateError
from octavo.text import prompt
from octavo.text.prompt import ChatTemplate
from tests.support.tokenizers import DATA

TEMPLATES = sorted(path.name for path in (DATA / "templates").glob("*.jinja"))
REFERENCE = json.loads((DATA / "refs" / "chat_template_renders.json").read_text(encoding="utf-8"))
USER: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] = USER, **options: Any) -> str:
    return ChatTemplate(source, "test", "<s>", "</s>").render(messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_equal_the_reference(name: str) -> None:
    template = ChatTemplate((DATA / "templates" / name).read_text(encoding="utf-8"), name, "", "")
    assert len(REFERENCE["renders"][name]) >= 6
    for conversation, expected in REFERENCE["renders"][name].items():
        given = REFERENCE["conversations"][conversation]
        if isinstance(expected, str):
            assert template.render(given["messages"], tools=given["tools"], variables=given["kwargs"]) == expected, conversation
        else:  # the template cannot render this one; its own error is ours
            with pytest.raises(TemplateError, match=r"can only concatenate str"):
                template.render(given["messages"], tools=given["tools"], variables=given["kwargs"])


def test_the_language_of_chat_templates_is_there() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ eos_token }}") == "<s>hi></s>"
    assert render("{{ add_generation_prompt }}{{ tools is none }}", add_generation_prompt=False) == "FalseTrue"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # blocks trimmed on both sides
    assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "023"
    assert render("{% generation %}{{ 'a' }}{% endgeneration %}") == "a"
    assert render("{{ {'b': '<é>', 'a': 1}|tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1]|tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{{ strftime_now('%Y')|length }}{{ none }}{{ missing }}") == "4None"
    assert render("{{ x|default('d') }}{{ enable_thinking }}", variables={"enable_thinking": False}) == "dFalse"
    assert render("{% macro m(x, y='!') %}{{ x }}{{ y }}{% endmacro %}{{ m('a') ~ m('b', y=1) }}") == "a!b1"
    assert render("{% set ns = namespace(n=0) %}{% for c in 'abc' %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ ns.n ** 2 % 7 }}") == "1"
    assert render("{{ 'a,b'.split(',')[::-1]|join('-') }}{{ ' x '.strip() }}{{ 'x'.startswith(('x', 'y')) }}") == "b-axTrue"
    assert render("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list }}") == "['hi']"
    assert render("{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}{{ ('a', 1) == ('a', 1) }}") == "a2b1True"


def default_system_prompt(source: str) -> str | None:
    return ChatTemplate(source, "test", "<s>", "</s>").default_system_prompt()


# promise: v1-models-says
def test_the_system_prompt_that_a_template_adds_is_found() -> None:
    qwen = (DATA / "templates" / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text(encoding="utf-8")
    assert default_system_prompt(qwen) == "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    added = "{% if messages[0].role != 'system' %}[system]Be kind.\n{% endif %}"
    each = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    assert default_system_prompt(added + each) == "Be kind."


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",  # adds none
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",  # roles are not written
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}Be kind. {{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",  # twice
        "[system]{{ messages[0].content if messages[0].role == 'system' else 'Be kind.' }}{{ messages|length }}",
        "[system]{{ messages[0].content|upper if messages[0].role == 'system' else 'Be kind.' }}",
        "[system]{{ messages[0].content if messages[0].role == 'system' else 'Be kind.' }}{{ '!' if messages[0].content == 'Be kind.' }}",
        "{{ messages[5].content.none }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_of_which_it_cannot_be_told_has_no_system_prompt(source: str) -> None:
    assert default_system_prompt(source) is None


GROW = "{% set ns = namespace(s=SEED, t=SEED) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}"
DEEP = GROW.replace("SEED", "[1]").replace("STEP", "[ns.s, ns.s]")
BOMBS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in [1] %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(500) %}" + "x" * 100_000 + "{% endfor %}",
    "{% set x %}{% for i in range(500) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * [0] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set s = 'f' * 4000000 %}{{ s|int(base=16) // 3 }}",
    GROW.replace("SEED", "'ab'").replace("STEP", "ns.s ~ ns.s"),
    GROW.replace("SEED", "'ab'").replace("STEP", "ns.s + ns.s"),
    GROW.replace("SEED", "[1]").replace("STEP", "ns.s + ns.s"),
    GROW.replace("SEED", "3").replace("STEP", "ns.s * ns.s"),
    GROW.replace("SEED", "(1,)").replace("STEP", "(ns.s, ns.s)") + "{{ {ns.s: 1} }}",
    DEEP + "{{ ns.s }}",
    DEEP + "{{ ns.s|tojson }}",
    DEEP + "{{ 'x' ~ ns.s }}",
    DEEP + "{{ [ns.s]|join }}",
    DEEP + "{% set ns.t = ns.s %}" + DEEP.partition("%}")[2] + "{{ ns.s == ns.t }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'['ljust'](10**9) }}",
    "{{ 'a'|indent(10**9, true) }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s|replace('', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.join(s) }}",
    "{{ range(99999)|join('a' * 100000) }}",
    "{% set s = 'я' * 4000000 %}{{ s.strip('b' * 2000000 + 'я') }}",
    "{% set s = 'я' * 4000000 %}{{ s|list|length }}",
    "{% set s = 'я' * 4000000 %}{{ s|map(attribute='x')|list|length }}",
    "{% set s = 'я ' * 2000000 %}{{ s.split()|length }}",
    "{% set s = 'я' * 4000000 %}{{ range(*s) }}",
    "{% set s = 'a' * 1000000 %}" + GROW.replace("SEED", "[]").replace("STEP", "[ns.s, s[1:]]"),
    "{% set s = 'a' * 1000000 %}" + GROW.replace("SEED", "[]").replace("STEP", "[ns.s, s.removeprefix('a')]"),
    "{% set s = ['a' * 1000000] * 100000 %}{{ 'z' in (s|map('upper')) }}",
    "{% set s = ['a' * 1000000] * 100000 %}{{ s }}",
    "{{ lipsum(100000) }}",
    "{{ strftime_now('%Y' * 1000000) }}",
]


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_stopped_in_time_and_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt.MAX_SECONDS <= 2
    monkeypatch.setattr(prompt, "MAX_SECONDS", 0.2)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(TemplateError) as caught:
            render(source)
        seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 5 and peak < 150e6
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.popen('touch escaped') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ joiner['__init__']['__globals__'] }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ 'a'|attr('__class__') }}",
        "{{ [namespace]|map(attribute='__init__')|map(attribute='__globals__')|list }}",
    ],
)
def test_no_template_reaches_python(source: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError, match=r"unsafe|No filter"):
        render(source, messages)
    assert not list(tmp_path.iterdir()) and messages == [{"role": "user", "content": "hi"}]


def test_errors_are_one_short_line_with_the_name() -> None:
    with pytest.raises(TemplateError, match=r"^chat template of test is not valid \(line 2\): Encountered unknown tag 'nonsense'"):
        ChatTemplate("a\n{% nonsense %}", "test", "", "")
    with pytest.raises(TemplateError, match=r"^chat template of test is not valid \(line 1\): the statement Include is not supported"):
        ChatTemplate("{% include 'x' %}", "test", "", "")
    with pytest.raises(TemplateError, match=r"^chat template of test is not valid: maximum recursion"):
        ChatTemplate("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "test", "", "")
    with pytest.raises(TemplateError, match=r"has 300,000 characters, at most 65,536 are taken$"):
        ChatTemplate("x" * 300_000, "test", "", "")
    with pytest.raises(TemplateError, match=r"^chat template of test failed: roles must alternate$"):
        render("{{ raise_exception('roles must\n alternate') }}")
    with pytest.raises(TemplateError, match=r"^chat template of test failed: 'thing' is undefined$"):
        render("{{ thing.x }}")
    with pytest.raises(RequestError, match="variable 'messages' is set by the engine"):
        render("x", variables={"messages": []})


def test_limits_start_afresh_with_each_render() -> None:
    template = ChatTemplate("{% set s = 'a' * (units // 3) %}{{ s|length }}", "test", "", "")
    for _ in range(5):
        assert template.render(USER, variables={"units": prompt.MAX_UNITS})


def test_a_large_conversation_renders() -> None:
    template = ChatTemplate((DATA / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8"), "qwen3", "", "")
    turns: list[dict[str, object]] = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 2000} for turn in range(401)]
    assert template.render(turns).count("word ") == 401 * 2000


@pytest.mark.timed("what a thread gets done within the time limit of another")
def test_threads_render_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation in a thread keeps nobody waiting, and its limits are its own."""
    monkeypatch.setattr(prompt, "MAX_SECONDS", 0.3)
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}done", "test", "", "")
    failures: list[TemplateError] = []

    def hang() -> None:
        with pytest.raises(TemplateError) as caught:
            template.render(USER, variables={"n": 99999})
        failures.append(caught.value)

    thread = threading.Thread(target=hang)
    start = time.perf_counter()
    thread.start()
    others = 0
    while thread.is_alive() and time.perf_counter() < start + 10:
        assert template.render(USER, variables={"n": 0}) == "done"
        others += 1
    assert len(failures) == 1 and others > 10
    thread.join()
