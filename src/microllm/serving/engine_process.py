"""An engine in a process of its own: commands come in over a socket, pieces of answers go out, steps run in between.

    python -m microllm.serving.engine_process FD     started by ``engine_client.py``; FD is the socket

Frames in:   {"load": ...} first; then {"add": id, "prompts", "params", "salt"}, {"cancel": id}
Frames out:  {"ready": ...} or {"fatal": text} first; then {"accepted": [id], "refused": [[id, kind, text]],
             "pieces": [[id, choice, text, token ids, log-probabilities, finish reason, facts]], "report": ...}

One thread runs steps and reads commands between them; another writes, so that a slow reader holds up no step. The
process ends with its socket: it outlives no HTTP process, however that one died.
"""

from __future__ import annotations

import logging
import queue
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import torch

from microllm.errors import MicroLLMError, RequestError
from microllm.inference import Engine, EngineConfig, Request, load
from microllm.inference.placement import engine_precision
from microllm.inference.prewarm import PrewarmReport
from microllm.sampling import SamplingParams
from microllm.serving.wire import FrameReader, Message, encode_frame

REPORT_S = 0.1
"""At most one report in this time while steps run."""
HEARTBEAT_S = 0.5
"""At least one frame in this time while nothing runs."""
MAX_FAILED_STEPS = 3
"""Steps that may fail one after another before the process gives up."""
_READ_BYTES = 1 << 18
CHECKPOINT_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What of the sampling parameters that a checkpoint's author published a server may start from."""
log = logging.getLogger(__name__)


class EngineLoop:
    """One engine, the requests that it runs for the other side, and the socket between."""

    def __init__(self, engine: Engine, connection: socket.socket, reader: FrameReader) -> None:
        self._engine, self._connection, self._reader = engine, connection, reader
        self._requests: dict[int, list[Request]] = {}
        self._place: dict[Request, tuple[int, int]] = {}
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._reported_s = 0.0
        self._num_failed = 0

    def run(self, first: list[Message]) -> None:
        """Serve until the other side closes; ``first`` came with the load command."""
        self._writer.start()
        commands: list[Message] | None = first
        while commands is not None:
            out: Message = {}
            for command in commands:
                self._obey(command, out)
            if self._engine.has_work:
                self._step(out)
            self._report(out)
            if out:
                self._outbox.put(out)
            commands = self._receive(0 if self._engine.has_work else HEARTBEAT_S)
        self._outbox.put(None)
        self._writer.join(timeout=1)

    def _receive(self, wait_s: float) -> list[Message] | None:
        """Return the commands that came, waiting for the first; None when the other side is gone."""
        if not self._poll.poll(1000 * wait_s):
            return []
        try:
            data = self._connection.recv(_READ_BYTES)
        except ConnectionError:
            return None
        return self._reader.feed(data) if data else None

    def _obey(self, command: Message, out: Message) -> None:
        if "cancel" in command:
            for request in self._requests.pop(command["cancel"], []):
                self._place.pop(request, None)
                self._engine.cancel(request)
            return
        number = command["add"]
        try:
            params, salt = SamplingParams.from_dict(command["params"]), bytes.fromhex(command["salt"])
            requests = self._add_all(command["prompts"], params, salt)
        except MicroLLMError as error:
            out.setdefault("refused", []).append([number, "request", str(error)])
        except Exception as error:
            log.exception("request %d could not be added", number)
            out.setdefault("refused", []).append([number, "engine", f"{type(error).__name__}: {error}"])
        else:
            self._requests[number] = requests
            self._place |= {request: (number, choice) for choice, request in enumerate(requests)}
            out.setdefault("accepted", []).append(number)

    def _add_all(self, prompts: list[list[int]], params: SamplingParams, salt: bytes) -> list[Request]:
        """Queue all prompts or none."""
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests += self._engine.add(prompt, params, salt=salt)
        except MicroLLMError:
            for request in requests:
                self._engine.cancel(request)
            raise
        return requests

    def _step(self, out: Message) -> None:
        """Run a step; one that raises costs the requests that ran, and the process after a few in a row."""
        try:
            touched = self._engine.step()
            self._num_failed = 0 if touched else self._num_failed  # one that only clears up proves nothing
        except Exception as error:
            log.exception("a step failed")
            self._num_failed += 1
            for request in self._engine.scheduler.running:  # the next step takes them out
                request.sequence.fail(f"got {type(error).__name__} in a step: {error}; need none; report it")
            touched = [request for request in self._place if request.finish_reason is not None]
            if self._num_failed >= MAX_FAILED_STEPS:
                raise
        pieces = out.setdefault("pieces", [])
        for request in touched:
            place = self._place.get(request)
            if place is not None:
                pieces.append(self._piece(request, *place))

    def _piece(self, request: Request, number: int, choice: int) -> list[Any]:
        piece = request.sequence.piece()
        logprobs = piece.logprobs and [[each.logprob, each.top] for each in piece.logprobs]
        facts: Message | None = None
        if piece.finish_reason is not None:
            facts = {
                "cached_tokens": request.cached_prefix_tokens, "preemptions": request.preemptions,
                "cold": request.cold, "error": request.completion.error,
            }  # fmt: skip
            del self._place[request]
            if not any(other in self._place for other in self._requests[number]):
                del self._requests[number]
        return [number, choice, piece.text, piece.token_ids, logprobs, piece.finish_reason, facts]

    def _report(self, out: Message) -> None:
        now = time.monotonic()
        if self._engine.has_work and now - self._reported_s < REPORT_S:
            return
        self._reported_s = now
        out["report"] = asdict(self._engine.report())

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._connection.sendall(encode_frame(message))
        except OSError:
            log.debug("the other side is gone")


def serve_engine(connection: socket.socket) -> int:
    """Load what the first command names and serve it; return the exit status."""
    reader, commands = FrameReader(), list[Message]()
    while not commands:
        data = connection.recv(_READ_BYTES)
        if not data:
            return 0
        commands = reader.feed(data)
    try:
        engine, facts = load_engine(commands.pop(0)["load"])
    except MicroLLMError as error:
        connection.sendall(encode_frame({"fatal": str(error)}))
        return 2
    connection.sendall(encode_frame({"ready": facts}))
    EngineLoop(engine, connection, reader).run(commands)
    return 0


def load_engine(options: Message) -> tuple[Engine, Message]:
    """Return an engine that has answered once, and what the HTTP process needs to know of it.

    Raises:
        MicroLLMError: the model cannot be loaded, or the engine's options cannot work.
    """
    started = time.perf_counter()
    config = EngineConfig(**options["engine"])
    device, num_gpus = options["device"], torch.cuda.device_count()
    if device in ("auto", "cuda") and num_gpus > 1:
        device = f"cuda:{options['replica'] % num_gpus}"
    precision = engine_precision(options["precision"], device)
    llm = load(options["model"], device=device, precision=precision, num_threads=options["num_threads"])
    engine = Engine(llm, config)
    loaded = time.perf_counter()
    known = llm.tokenizer.known_ids_mask(llm.config.vocab_size).nonzero()[:, 0].tolist()
    pool_tokens = engine.pool.num_pages * config.page_tokens
    longest = min(engine.context, pool_tokens + 1)
    warmed = engine.prewarm() if options["prewarm"] else PrewarmReport(())
    # The first use of each path costs more than all later ones: before anybody waits for it.
    engine.generate([known[:1] * max(1, min(32, longest - 2))], SamplingParams(temperature=0, max_tokens=2))
    defaults = {name: getattr(llm.default_params, name) for name in CHECKPOINT_SAMPLING}
    facts = {
        "precision": llm.precision, "device": str(llm.device), "longest_tokens": longest, "pool_tokens": pool_tokens,
        "page_tokens": config.page_tokens, "max_rows": config.num_rows, "defaults": defaults,
        "load_ms": 1e3 * (loaded - started), "warm_ms": 1e3 * (time.perf_counter() - loaded),
        "warm_shapes": len(warmed.shapes), "warm_bytes": warmed.num_bytes, "memory": asdict(engine.memory()),
    }  # fmt: skip
    return engine, facts


def main() -> int:
    """Serve the socket whose descriptor is the only argument."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group; the HTTP process says when
        signal.signal(number, signal.SIG_IGN)
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        raise RequestError(f"got arguments {sys.argv[1:]}; need one file descriptor; run microllm serve")
    return serve_engine(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
