"""Code blocks of a Markdown file, and what to do with each.

A `python` block is run. A `bash` block is run if every command in it starts with one of RUNNABLE; its `make` lines are
checked against the Makefile instead (running them would set up and test the clone from inside its own tests). Anything
else needs `<!-- no-run: reason -->` on a line above the block. Blocks in other languages, or in none, are for the eye.

A line `octavo serve ...` starts a server in the background, for the other commands. A block that talks to ADDRESS without such a
line gets a server without flags. Either listens on a port of its own, which takes the place of ADDRESS.
"""

import re
import shlex
from dataclasses import dataclass, replace

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
OPT_OUT = re.compile(r"<!-- no-run: (?P<reason>[^\n]*?\w[^\n]*?) -->\s*\Z")
RUNNABLE = ("octavo", "python", "curl", "echo", "printf", "cat", "head")
SERVE = re.compile(r"octavo serve\b(?!.*--show-config)")
ADDRESS = "127.0.0.1:8000"
MAKE = re.compile(r"^(\w+=\S+ )*make\b")


@dataclass(frozen=True)
class Block:
    name: str  # file:line of the fence
    language: str
    text: str
    reason: str  # why it does not run; "" if it does

    @property
    def commands(self) -> list[str]:
        """The command lines of a bash block: continued lines joined, comments and blanks left out."""
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def make_targets(self) -> list[str]:
        words = [MAKE.sub("", command).split("#")[0].split() for command in self.commands if MAKE.match(command)]
        return [word for line in words for word in line if "=" not in word]

    @property
    def server(self) -> tuple[str, ...] | None:
        """The words behind `octavo serve` for the server that this block talks to, or None if it needs none."""
        started = [tuple(shlex.split(command, comments=True)[2:]) for command in self.commands if SERVE.match(command)]
        assert len(started) <= 1, f"{self.name}: one server is started for a block"
        return started[0] if started else () if ADDRESS in self.text else None

    def at(self, address: str) -> "Block":
        """The same block for a server at this address."""
        return replace(self, text=self.text.replace(ADDRESS, address))

    @property
    def script(self) -> str:
        """What bash runs of it: all but the lines of make and of a server."""
        return "\n".join(command for command in self.commands if not MAKE.match(command) and not SERVE.match(command))

    @property
    def unknown_commands(self) -> list[str]:
        return [command for command in self.script.splitlines() if command.split()[0] not in RUNNABLE]


def code_blocks(name: str, markdown: str) -> list[Block]:
    blocks = []
    for fence in FENCE.finditer(markdown):
        if fence["language"] in ("python", "bash"):
            line = markdown.count("\n", 0, fence.start()) + 1
            opt_out = OPT_OUT.search(markdown[: fence.start()])
            text = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
            blocks.append(Block(f"{name}:{line}", fence["language"], text, opt_out["reason"] if opt_out else ""))
    return blocks


def targets_of(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
