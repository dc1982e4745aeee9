"""How much memory another process holds: its anonymous pages, watched from outside so that the watching costs it nothing."""

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli.processes import ROOT, SECONDS, environment

MIB = 2**20
POLL_SECONDS = 0.0005  # tensors worth counting live longer

# Everything imported and the threads started: what an engine costs from there on is its own.
LOAD = """
import json, random, sys
settings = json.loads(sys.argv[1])
import torch, numpy, safetensors, tokenizers, jinja2, octavo.llm, octavo.worker.build
from octavo import LLM, SamplingParams
torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    torch.ones(256, 256, dtype=dtype) @ torch.ones(256, 256, dtype=dtype)
print("imported", flush=True); sys.stdin.readline()
rng = random.Random(0)
with LLM(settings["model"], **settings["engine"]) as llm:
    prompts = [[rng.randrange(settings["vocab"]) for _ in range(settings["prompt"])] for _ in range(settings["requests"])]
    params = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=settings["tokens"], ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
"""


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def held_under_load(settings: dict[str, Any]) -> tuple[int, int]:
    """Bytes a process holds with everything imported, and at most while it starts an engine and runs a full load."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD, json.dumps(settings)],
        cwd=ROOT, env=environment({"OCTAVO_LOG_LEVEL": "ERROR"}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin and process.stdout
    with process:
        assert select.select([process.stdout], [], [], SECONDS)[0] and process.stdout.readline() == "imported\n"
        before = most = anonymous_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            select.select([process.stdout], [], [], POLL_SECONDS)
            most = max(most, anonymous_bytes(process.pid))
    assert process.returncode == 0
    return before, most
