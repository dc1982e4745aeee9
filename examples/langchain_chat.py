"""LangChain talks to a running server: invoke, stream, batch, tools, structured output, and a conversation that is too long.

`octavo serve --tool-call-parser hermes` in one terminal (the default model's template has no place for tools of its own); here
`pip install langchain-openai`, then `python examples/langchain_chat.py [URL]`.
"""

import sys
from collections.abc import Iterable
from functools import reduce
from operator import add

from langchain_core.messages import BaseMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel, Field


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city for some days."""
    return f"{days} sunny days in {city}"


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def joined(pieces: Iterable[BaseMessageChunk]) -> BaseMessageChunk:
    return reduce(add, pieces)


def main(url: str) -> None:
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="SmolLM2-135M-Instruct", temperature=0, max_tokens=48, stream_usage=True)

    answer = model.invoke("What colour is the sky?")
    print("invoke    ", repr(answer.text), answer.usage_metadata)

    answer = joined(model.stream("Name three colours."))
    print("stream    ", repr(answer.text), answer.usage_metadata)

    print("batch     ", [answer.text for answer in model.batch(["Say hello.", "Say goodbye."])])

    forced = model.bind_tools([weather], tool_choice="required", strict=True)
    question = "What will the weather be like in Oslo for 3 days?"
    call = forced.invoke(question)
    print("tools     ", call.tool_calls, "->", [weather.invoke(asked) for asked in call.tool_calls])
    print("streamed  ", joined(forced.stream(question)).tool_calls)

    for method in ("json_schema", "function_calling"):
        print("structured", repr(model.with_structured_output(Person, method=method).invoke("Ada Lovelace was 36 years old.")))

    try:
        model.invoke("word " * 20_000)
    except BadRequestError as error:
        print("too long  ", error.status_code, error.code)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
