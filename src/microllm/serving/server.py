"""Run the application under uvicorn until a signal, and end well: status 0 after a drain, 2 without a model."""

from __future__ import annotations

import logging
import signal
import socket
from types import FrameType

import uvicorn

from microllm.errors import ConfigError, UnavailableError
from microllm.serving.app import build_app
from microllm.serving.gate import log_as_json
from microllm.serving.server_config import ServerConfig

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """A server whose first signal also drains the service."""

    def __init__(self, config: ServerConfig, port: int) -> None:
        self.fatal: str | None = None
        app = build_app(config, self._end)
        self._service = app.state.service
        options = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="on", timeout_keep_alive=30,
            timeout_graceful_shutdown=round(config.drain_s + 10), host=config.host, port=port,
        )  # fmt: skip
        super().__init__(options)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop accepting, let what is in flight end; a second Ctrl-C does not wait."""
        self._service.drain()
        super().handle_exit(sig, frame)

    def stop_early(self, sig: int, frame: FrameType | None) -> None:
        """Stop before or after the loop runs."""
        self.should_exit = True

    def _end(self, error: str) -> None:
        self.fatal = error
        self.should_exit = True


def run_server(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        MicroLLMError: the model, a key file or the port cannot be used, or an engine could not be started.
    """
    log_as_json()
    listener = _listen(config)
    host, port = listener.getsockname()[:2]
    server = DrainingServer(config, port)
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.api_keys():
        log.warning("%s is not loopback and no API key is set: whoever reaches port %d may ask", config.host, port)
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # before uvicorn's own stand, and when it raises them again
        signal.signal(number, server.stop_early)
    log.info("listening", extra={"facts": {"url": f"http://{host}:{port}", "model": config.model}})
    server.run(sockets=[listener])
    if server.fatal is not None:
        raise UnavailableError(server.fatal)
    log.info("stopped")
    return 0


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)  # from now on whoever comes waits, and is not refused
    except OSError as error:
        raise ConfigError(
            f"got {error} for {config.host}:{config.port}; need a free address; take another port"
        ) from error
    return listener
