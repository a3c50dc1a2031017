"""What a server survives: clients that go, wait or flood; engines that fail; signals. Every page comes back."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ENDLESS = {"max_tokens": 480, "ignore_eos": True}


def raw_request(server, body, *, path="/v1/completions"):
    """Send a request over a plain socket, which the caller may close as rudely as it likes."""
    content = json.dumps({"model": "tiny", **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def num_in_flight(server):
    stats = server.stats()
    return stats["running"] + stats["waiting"]


# ---- clients that go


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "while decoding"])
def test_a_client_that_goes_is_cancelled(settled, stream, when):
    generated = settled.metric("microllm_generated_tokens_total")
    cancelled = settled.metric('microllm_choices_finished_total{reason="cancelled"}')
    connection = raw_request(settled, {"prompt": "the " * 60, "stream": stream, "n": 4, **ENDLESS})
    if when == "while decoding":
        settled.wait_until(lambda: settled.metric("microllm_generated_tokens_total") > generated)
    connection.close()
    settled.wait_until(lambda: settled.metric('microllm_choices_finished_total{reason="cancelled"}') >= cancelled + 4)
    settled.settle()
    assert settled.metric("microllm_generated_tokens_total") < generated + 4 * 480


@pytest.mark.slow
def test_a_client_that_goes_mid_prefill_is_cancelled(serve):
    with serve("--max-rows", "2", "--max-step-tokens", "4") as server:  # a prompt of 400 tokens takes 100 to 200 steps
        connections = [raw_request(server, {"prompt": "x" * 400 + str(i), "stream": True}) for i in range(4)]
        server.wait_until(lambda: num_in_flight(server) > 0)
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close with a reset
            connection.close()
        server.settle()
        assert server.complete(max_tokens=2).status_code == 200


def test_two_equal_prefixes_at_once_and_one_is_cancelled(settled):
    prompt = "and the other words of a prompt that both share " * 4
    alone = settled.complete(prompt, max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    other = raw_request(settled, {"prompt": prompt, "temperature": 0, "stream": True, **ENDLESS})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        kept = pool.submit(settled.complete, prompt, max_tokens=40, ignore_eos=True)
        other.recv(1000)
        other.close()
        answer = kept.result().json()
    assert answer["choices"][0]["text"] == alone
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


def test_a_slow_reader_holds_up_nobody_and_gets_everything(settled):
    body = {"prompt": "slow", "stream": True, "logprobs": 5, "temperature": 0, **ENDLESS}
    connection = raw_request(settled, body)
    started = time.monotonic()
    for _ in range(5):
        assert settled.complete(max_tokens=5).status_code == 200
    assert time.monotonic() - started < 20
    settled.settle()  # the engine did not wait for the reader
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(1 << 16)
    connection.close()
    assert received.count(b'"finish_reason":"length"') == 1


@pytest.mark.slow
def test_a_reader_that_never_reads_is_dropped(settled):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    host, port = settled.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    body = {"model": "tiny", "prompt": "never", "stream": True, "logprobs": 20, "n": 4, **ENDLESS}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    settled.settle()
    assert settled.complete(max_tokens=2).status_code == 200
    connection.close()


def test_a_body_that_does_not_come_is_not_waited_for(settled):
    host, port = settled.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


# ---- floods


@pytest.mark.slow
def test_two_hundred_connections_on_a_queue_of_32(settled):
    """Four run, 28 wait, the others hear so at once."""

    def run(number):
        body = {"model": "tiny", "prompt": f"{number} flood", "temperature": 0, "max_tokens": 80, "ignore_eos": True}
        return httpx.post(f"{settled.url}/v1/completions", json=body, timeout=120, trust_env=False)

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        found = list(pool.map(run, range(200)))
    done = [answer for answer in found if answer.status_code == 200]
    refused = [answer for answer in found if answer.status_code == 429]
    assert len(done) + len(refused) == 200
    assert len(done) >= 32
    assert len(refused) >= 32
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert all(answer.json()["usage"]["completion_tokens"] == 80 for answer in done)
    assert settled.metric("microllm_requests_rejected_total") >= len(refused)


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_ended(serve):
    with serve("--request-timeout-s", "0.3") as server:
        for _ in range(2):
            answer = server.complete("slow", n=8, **ENDLESS)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
        with server.http.stream(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "n": 8, "stream": True, **ENDLESS}
        ) as streamed:
            assert json.loads([line for line in streamed.iter_lines() if line][-1][6:])["error"]["code"] == "timeout"
        server.settle()


# ---- keys and limits


@pytest.mark.slow
def test_keys_are_asked_for_and_keep_prefixes_apart(serve, tmp_path):
    (tmp_path / "keys").write_text("# ours\nalpha-key\nbeta-key\n")
    flags = ["--api-key-file", str(tmp_path / "keys"), "--max-answer-tokens", "50", "--checkpoint-sampling"]
    with serve(*flags, environment={"MICROLLM_API_KEY": "gamma-key"}) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "alpha-key"}):
            for path in ("/v1/models", "/metrics", "/stats"):
                answer = server.http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert [server.http.get(path).status_code for path in ("/", "/health", "/ready")] == [200] * 3
        prompt = "a prompt that is long enough to fill some pages of the cache"

        def cached(key):
            server.http.headers["authorization"] = f"Bearer {key}"
            usage = server.complete(prompt, max_tokens=2, temperature=0).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [cached(key) for key in ("alpha-key", "alpha-key", "beta-key", "gamma-key")] == [0, 48, 0, 0]
        assert server.complete(max_tokens=51).status_code == 400
        assert server.chat(ignore_eos=True).json()["usage"]["completion_tokens"] == 50
        card = server.http.get("/v1/models").json()["data"][0]
        assert (card["checkpoint_sampling_applied"], card["checkpoint_sampling"]["top_k"]) == (True, 7)
        plain = {"model": "tiny", "prompt": "x", "max_tokens": 30, "seed": 1, "ignore_eos": True}
        spelled = plain | {"temperature": 0.5, "top_k": 7}
        texts = [
            server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in (plain, spelled)
        ]
        assert texts[0] == texts[1]


# ---- engines that fail


@pytest.mark.slow
def test_an_engine_that_is_killed_is_started_anew_and_what_waits_survives(serve):
    with serve("--max-rows", "1") as server:
        (pid,) = server.engine_pids()
        want = server.complete("waits", max_tokens=5).json()["choices"][0]["text"]
        running = raw_request(server, {"prompt": "runs", "stream": True, **ENDLESS})
        assert b"data: " in running.recv(4096) + running.recv(4096)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(server.complete, "waits", max_tokens=5)
            server.wait_until(lambda: server.stats()["waiting"] == 1)
            os.kill(pid, signal.SIGKILL)
            lost = b""
            while not lost.endswith(b"\n\n\r\n0\r\n\r\n"):
                lost += running.recv(4096)
            assert b'"code": "engine_lost"' in lost
            health = server.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "dead")
            assert server.http.get("/ready").status_code == 503
            refused = server.complete("new", max_tokens=5)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert waits.result().json()["choices"][0]["text"] == want
        running.close()
        assert server.http.get("/health").status_code == 200
        assert server.metric("microllm_engine_starts") == 2
        server.settle()


@pytest.mark.slow
def test_an_engine_that_hangs_is_found_dead_and_replaced(serve):
    with serve("--engine-timeout-s", "2") as server:
        (pid,) = server.engine_pids()
        os.kill(pid, signal.SIGSTOP)
        server.wait_until(lambda: server.http.get("/health").status_code == 503)
        server.wait_until(lambda: server.http.get("/ready").status_code == 200)
        assert server.engine_pids() != [pid]
        assert server.complete(max_tokens=2).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--model", "nowhere/nothing"], ["--kv-bytes", "1"]])
def test_a_server_that_cannot_be_says_so_and_exits(tiny, flags):
    command = [sys.executable, "-m", "microllm", "serve", "--model", tiny, "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "got" in done.stderr
    assert "Traceback" not in done.stderr


# ---- signals


@pytest.mark.slow
def test_sigterm_lets_what_runs_end_and_lets_nothing_in(serve):
    with serve("--max-rows", "2") as server, concurrent.futures.ThreadPoolExecutor() as pool:
        answers = [pool.submit(server.complete, f"{i}", max_tokens=200, ignore_eos=True) for i in range(6)]
        server.wait_until(lambda: num_in_flight(server) == 6)
        server.process.send_signal(signal.SIGTERM)
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [200] * 6
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", trust_env=False)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_sigterm_while_it_loads_ends_it_too(tiny, delay):
    command = [sys.executable, "-m", "microllm", "serve", "--model", tiny, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while '"listening"' not in process.stderr.readline():
            pass
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_what_runs_past_the_drain_is_told(serve):
    with serve("--drain-s", "0.2", "--max-rows", "1") as server:
        body = {"prompt": "x", "stream": True, "n": 4, **ENDLESS}
        with raw_request(server, body) as stream, concurrent.futures.ThreadPoolExecutor() as pool:
            stream.recv(100)
            whole = pool.submit(server.complete, "y", n=4, **ENDLESS)
            server.wait_until(lambda: num_in_flight(server) == 8)
            server.process.send_signal(signal.SIGTERM)
            assert whole.result().json()["error"]["code"] == "shutting_down"
            received = b""
            while piece := stream.recv(1 << 16):
                received += piece
        assert b'"code": "shutting_down"' in received
        assert server.process.wait(20) == 0


@pytest.mark.slow
def test_an_engine_does_not_outlive_its_server(serve):
    with serve() as server:
        (pid,) = server.engine_pids()
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}/cmdline") and Path(f"/proc/{pid}/cmdline").read_text():
            assert time.monotonic() < end, "the engine lives on"
            time.sleep(0.05)
