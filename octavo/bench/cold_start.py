"""The process `octavo bench startup` starts: it says on stdout, a line each, how far it has come.

    import            octavo and torch are loaded
    ready             an LLM is open
    first_token       it gave one
    peak_memory N     bytes held at most
"""

import json
import sys

from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams


def main(settings: str) -> None:
    """`settings`: the fields of an EngineConfig, as JSON."""
    config = EngineConfig(**json.loads(settings))
    import octavo.engine.build  # noqa: F401  # torch, which an LLM loads only when it is made
    from octavo.bench.machine import peak_memory
    from octavo.llm import LLM

    print("import", flush=True)
    with LLM.from_config(config) as llm:
        print("ready", flush=True)
        next(iter(llm.stream([0] if config.skip_tokenizer_init else "Hello", SamplingParams(temperature=0, max_tokens=1))))
        print("first_token", flush=True)
        print("peak_memory", peak_memory(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
