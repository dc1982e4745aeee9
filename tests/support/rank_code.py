"""Changes what the other ranks of a model run: their processes cannot be patched from a test."""

import sys
from pathlib import Path

import pytest


def change_ranks(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank processes that start from here on run this code before they begin."""
    script = folder / "changed_rank.py"
    script.write_text(f"import sys\nfrom octavo.worker import rank_process\n{code}\nrank_process.main(int(sys.argv[1]))\n")
    monkeypatch.setattr("octavo.worker.host_ranks.command", lambda module, name, parent: [sys.executable, str(script), str(parent)])
