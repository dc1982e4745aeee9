"""Makes this folder: the page as the server has it, and the lesson, recorded on the real engine with the default model.

    python docs/demo/make.py               the page again, with the recording that is there
    python docs/demo/make.py --record      the recording too; takes a minute and a half

Any static host can show it: `python -m http.server --directory docs/demo`.
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
PAUSE_SECONDS = 2.5  # between scenes


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
    RECORDING.chmod(0o644)  # a recording is private, this one is for all
    print(f"{RECORDING.name}: {RECORDING.stat().st_size:,} bytes")


def copy() -> None:
    shutil.rmtree(HERE / "web", ignore_errors=True)
    shutil.copytree(WEB, HERE / "web", ignore=shutil.ignore_patterns("index.html", "__pycache__"))
    shutil.copy(WEB / "index.html", HERE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record()
    copy()
