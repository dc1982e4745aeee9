"""Makes this folder: the page's own files, started by `demo.js` instead of `main.js`, with a recording of the lesson.

    python docs/demo/make.py               copies the page; keeps the recording that is there
    python docs/demo/make.py --record      also records the lesson again, on real engines with the default model; takes three minutes

Any static host can show it: `python -m http.server 8080`, then http://127.0.0.1:8080/docs/demo/.
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

HERE = Path(__file__).parent
WEB = HERE.parents[1] / "octavo" / "web"
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


def copy() -> None:
    shutil.rmtree(HERE / "web", ignore_errors=True)
    shutil.copytree(WEB, HERE / "web", ignore=shutil.ignore_patterns("index.html", "__pycache__"))
    page = (WEB / "index.html").read_text()
    if page.count(ENTRY) != 1:
        raise SystemExit(f"octavo/web/index.html should have {ENTRY} once")
    (HERE / "index.html").write_text(page.replace(ENTRY, DEMO_ENTRY))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record()
    copy()
