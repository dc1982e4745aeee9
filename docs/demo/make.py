"""Builds the demo: the files of octavo/web, started by `demo.js` instead of `main.js`. It plays the recorded lesson without a server.

    python3 docs/demo/make.py              writes build/demo; needs nothing but Python
    python3 -m http.server 8080 --directory build/demo

    python docs/demo/make.py --record      records the lesson again first, on real engines with the default model; takes three minutes

Any static host can show the folder, also below its top.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "octavo" / "web"
DEMO = ROOT / "build" / "demo"
RECORDING = WEB / "lesson.ndjson"
PAUSE_SECONDS = 1.0  # between scenes
ENTRY, DEMO_ENTRY = 'src="./web/main.js"', 'src="./web/demo.js"'


def follow(url: str, file: BinaryIO, begun: threading.Event) -> None:
    """Writes the view of the engine that the lesson is about, as the page shows it: a note says when that is another one."""
    engine, moved = 0, True
    while moved:
        moved = False
        with urllib.request.urlopen(f"{url}/v1/view?engine={engine}") as lines:
            for line in lines:
                file.write(line)
                begun.set()
                frame = json.loads(line)
                if moved := frame["kind"] == "note" and frame.get("engine", engine) != engine:
                    engine = frame["engine"]
                    break


def record() -> None:
    command = [sys.executable, "-m", "octavo", "serve", "--lesson", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, RECORDING.open("wb") as file:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.match(r"Octavo is ready: (\S+)", line)))
        begun = threading.Event()
        following = threading.Thread(target=follow, args=(url, file, begun))
        following.start()
        begun.wait()
        with urllib.request.urlopen(f"{url}/v1/lesson") as reply:
            scenes = json.load(reply)["data"]
        for scene in scenes:
            print(f"{scene['scene']} of {len(scenes)}: {scene['title']}", flush=True)
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/lesson/{scene['scene']}", method="POST")).close()
            time.sleep(PAUSE_SECONDS)
        server.terminate()
        following.join()
    print(f"{RECORDING.name}: {RECORDING.stat().st_size:,} bytes")


def build(folder: Path) -> None:
    """Writes the demo there; what was in the folder is removed."""
    page = (WEB / "index.html").read_text()
    if page.count(ENTRY) != 1:
        raise SystemExit(f"octavo/web/index.html should have {ENTRY} once")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WEB, folder / "web", ignore=shutil.ignore_patterns("index.html", "__pycache__"))
    (folder / "index.html").write_text(page.replace(ENTRY, DEMO_ENTRY))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record the lesson again first")
    if parser.parse_args().record:
        record()
    build(DEMO)
    print(f"{DEMO.relative_to(ROOT)}: show it with `python3 -m http.server 8080 --directory {DEMO.relative_to(ROOT)}`")
