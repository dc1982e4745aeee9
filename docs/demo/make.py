"""Makes this folder: the page's own files, started by `demo.js` instead of `main.js`, with a recording of the lesson.

    python docs/demo/make.py               copies the page; keeps the recording that is there
    python docs/demo/make.py --record      also records the lesson again, on the real engine with the default model; takes two minutes

Any static host can show it: `python -m http.server 8080`, then http://127.0.0.1:8080/docs/demo/.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
WEB = HERE.parents[1] / "octavo" / "web"
RECORDING = WEB / "lesson.ndjson"
PAUSE_SECONDS = 1.0  # between scenes
ENTRY, DEMO_ENTRY = 'src="./web/main.js"', 'src="./web/demo.js"'


def record() -> None:
    RECORDING.unlink(missing_ok=True)
    command = [sys.executable, "-m", "octavo", "serve", "--lesson", "--port", "0", "--record", str(RECORDING)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.match(r"Octavo is ready: (\S+)", line)))
        with urllib.request.urlopen(f"{url}/v1/lesson") as reply:
            scenes = json.load(reply)["data"]
        for scene in scenes:
            print(f"{scene['scene']} of {len(scenes)}: {scene['title']}", flush=True)
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/lesson/{scene['scene']}", method="POST")).close()
            time.sleep(PAUSE_SECONDS)
        server.terminate()
    RECORDING.chmod(0o644)  # the server makes recordings readable for their owner only; this one is for everybody
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
