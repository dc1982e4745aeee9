"""OpenAI Agents talks to a running server over both of its APIs: an answer, and a tool that is called and whose result is answered.

`octavo serve --tool-call-parser hermes` in one terminal; here `pip install openai-agents`, then
`python examples/agents_tools.py [URL]`.
"""

import asyncio
import sys

from agents import (
    Agent,
    ItemHelpers,
    MessageOutputItem,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunItem,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def weather(city: str, days: int) -> str:
    """The weather of a city for some days."""
    return f"{days} sunny days in {city}"


async def show(model: Model) -> None:
    print(type(model).__name__)
    plain = Agent(name="plain", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200))
    # one call in the first turn; Agents sets `tool_choice` back after it, so that the next turn may answer
    forced = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    caller = Agent(name="caller", model=model, tools=[weather], model_settings=forced)
    for agent, question in ((plain, "What colour is the sky?"), (caller, "What will the weather be like in Oslo for 3 days?")):
        whole = await Runner.run(agent, question)
        print("  whole   ", " | ".join(map(line, whole.new_items)))
        streamed = Runner.run_streamed(agent, question)
        items = [event.item async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        print("  streamed", " | ".join(map(line, items)))


def line(item: RunItem) -> str:
    match item:
        case ToolCallItem():
            return f"{item.raw_item.name}({item.raw_item.arguments})"
        case ToolCallOutputItem():
            return f"-> {item.output}"
        case MessageOutputItem():
            return " ".join(ItemHelpers.text_message_output(item).split())
    return item.type


async def main(url: str) -> None:
    set_tracing_disabled(True)  # it would send traces to OpenAI
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for api in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await show(api(model="SmolLM2-135M-Instruct", openai_client=client))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
