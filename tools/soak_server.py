"""Keep a server busy for minutes and watch what it holds: errors, memory, files, pages.

    python tools/soak_server.py                        the demo, 16 streams, two minutes
    python tools/soak_server.py --streams 64 --seconds 600 -- --device cuda --model Qwen/Qwen3-0.6B

What stands after "--" goes to ``microllm serve``. Exit 1 when a request failed, or memory grew by more than a tenth
from the first quarter to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median

from microllm.lab.load import Call, run_over_http


def main() -> int:
    """Run the server, the streams and the watch; print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="flags of microllm serve")
    options = parser.parse_args()
    command = [sys.executable, "-m", "microllm", "serve", "--served-name", "soak", "--port", "0", *options.serve]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = _watch(process, options.streams, options.seconds)
        finally:
            process.send_signal(signal.SIGTERM)
    print(json.dumps(found | {"exit": process.returncode}, indent=2))
    return 0 if found["errors"] == 0 and found["growth"] < 1.1 and process.returncode == 0 else 1


def _watch(process: subprocess.Popen[str], num_streams: int, seconds: float) -> dict[str, object]:
    url = json.loads(process.stderr.readline())["url"]
    threading.Thread(target=process.stderr.read, daemon=True).start()
    host, port = url.removeprefix("http://").split(":")
    while not _get(url, "/stats")["engines_ready"]:
        time.sleep(0.2)
    answers, end = [], time.monotonic() + seconds

    def stream(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            call = Call(0.0, [draw.randrange(20, 40000) for _ in range(draw.randrange(8, 64))], draw.randrange(8, 33))
            answers.extend(run_over_http(host, int(port), "soak", [call], 1))

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    held = []
    while any(thread.is_alive() for thread in threads):
        held.append((_memory_mib(process.pid), len(list(Path(f"/proc/{process.pid}/fd").iterdir()))))
        time.sleep(1)
    totals = [http + engine for (http, engine), _ in held]
    quarter = max(1, len(totals) // 4)
    while (stats := _get(url, "/stats"))["running"] or stats["waiting"]:
        time.sleep(0.1)
    return {
        "requests": len(answers), "tokens": sum(answer.num_tokens for answer in answers),
        "errors": sum(bool(answer.error) for answer in answers), "kv_used_at_end": stats["kv_used"],
        "memory_mib_http_engine": [held[quarter][0], held[-1][0]], "files": [held[quarter][1], held[-1][1]],
        "growth": median(totals[-quarter:]) / median(totals[:quarter]),
    }  # fmt: skip


def _get(url: str, path: str) -> dict:
    with urllib.request.urlopen(url + path) as answer:
        return json.load(answer)


def _memory_mib(process_id: int) -> tuple[int, int]:
    """Return the resident memory of the HTTP process and of its engines."""
    children = [
        child
        for task in Path(f"/proc/{process_id}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return _resident_mib(process_id), sum(map(_resident_mib, children))


def _resident_mib(process_id: int | str) -> int:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    sys.exit(main())
