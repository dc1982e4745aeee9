"""A mapped file: its bytes come as they are, in any order, and little of it stays in memory."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.loading import mapped_file
from octavo.loading.mapped_file import MappedFile

SIZE, TENSOR = 64 * 2**20, 2 * 2**20  # a fault may bring 2 MiB with it


def resident(path: Path) -> int:
    """Bytes of the file that this process has in memory."""
    found = re.search(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert found, f"{path} is not mapped"
    return int(found[1]) * 1024


def test_what_was_read_some_time_ago_is_not_in_memory_and_still_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "KEPT", 4 * TENSOR)
    monkeypatch.setattr(mapped_file, "AHEAD", 2 * TENSOR)
    path, content = tmp_path / "weights", np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    file, views = MappedFile(path), {}
    starts = [*range(100, SIZE - TENSOR, TENSOR)]
    for start in starts[len(starts) // 2 :] + starts[: len(starts) // 2]:  # as in files that begin with what is used last
        views[start] = file.bytes(start, TENSOR)
        assert torch.equal(views[start], torch.from_numpy(content[start : start + TENSOR]))
        assert resident(path) < SIZE // 2
    for start, view in views.items():
        assert torch.equal(view, torch.from_numpy(content[start : start + TENSOR]))
