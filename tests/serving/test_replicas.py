"""Two engines behind one door, and the ways to put the application under somebody else's server."""

import asyncio
import concurrent.futures
import configparser
import importlib.util
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"


@pytest.mark.slow
def test_two_replicas_share_the_load_keep_prefixes_and_one_may_die(serve):
    with serve("--replicas", "2", "--max-rows", "2", "--num-threads", "1") as server:
        server.wait_until(lambda: server.stats()["engines_ready"] == 2)
        prompts = [f"{i} is how this prompt begins, which is longer than a page" for i in range(6)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            first = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=30).json(), prompts))
        used = [
            line for line in server.http.get("/metrics").text.splitlines() if line.startswith("microllm_engine_steps{")
        ]
        assert all(float(line.rsplit(" ", 1)[1]) > 3 for line in used), used  # more than its warm-up
        assert len(used) == 2
        again = [server.complete(prompt, max_tokens=30).json() for prompt in prompts]
        assert [a["choices"][0]["text"] for a in again] == [a["choices"][0]["text"] for a in first]
        assert all(a["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32 for a in again)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.wait_until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/ready").status_code == 200
        assert all(server.complete(prompt, max_tokens=5).status_code == 200 for prompt in prompts)
        server.wait_until(lambda: server.http.get("/health").status_code == 200)
        assert server.stats()["engines_ready"] == 2
        server.settle()


def load_example():
    spec = importlib.util.spec_from_file_location("ray_app", EXAMPLES / "ray_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_ray_example_is_an_application_that_answers(tiny, monkeypatch):
    example = load_example()
    assert (importlib.util.find_spec("ray") is not None) == hasattr(example, "deployment")
    monkeypatch.setattr(example, "CONFIG", replace(example.CONFIG, model=tiny, served_name="tiny"))
    config = uvicorn.Config(example.make_app(), port=0, lifespan="on", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as http:
            while http.get("/ready").status_code != 200:
                assert http.get("/health").status_code == 200
            body = {"model": "tiny", "prompt": "the", "max_tokens": 3, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def test_the_unit_and_the_container_name_what_there_is():
    from microllm.cli import parse_command

    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read_string((EXAMPLES / "microllm.service").read_text())
    words = unit["Service"]["ExecStart"].split()
    assert words[1] == "serve"
    assert parse_command("serve", words[2:], "x").config.drain_s < int(unit["Service"]["TimeoutStopSec"])
    assert unit["Service"]["KillMode"] == "mixed"  # else systemd ends the engines under the drain
    container = (EXAMPLES / "Containerfile").read_text()
    for name in [line.split()[1:-1] for line in container.splitlines() if line.startswith("COPY")]:
        assert all((EXAMPLES.parents[1] / each).exists() for each in name)
    assert 'ENTRYPOINT ["microllm", "serve"' in container
