"""``microllm serve``: an OpenAI-compatible HTTP server, and a page to chat at."""

from __future__ import annotations

from dataclasses import dataclass, field

from microllm.errors import MissingExtraError
from microllm.serving.server_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, as the OpenAI API does, with a page at /."""

    config: ServerConfig = field(default_factory=ServerConfig)

    def run(self) -> int:
        """Serve until SIGTERM or Ctrl-C."""
        try:
            from microllm.serving.server import run_server
        except ImportError as error:
            raise MissingExtraError(error.name or "fastapi", "serve", "microllm serve") from error
        return run_server(self.config)
