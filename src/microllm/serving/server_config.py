"""What a server may be told: one frozen object, checked when it is made; the flags of ``microllm serve``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from microllm.errors import ConfigError
from microllm.inference.engine_config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server listens, what it lets in, and how long it waits.

    Raises:
        ConfigError: a value out of its range; an API key file that cannot be read or holds no key.
    """

    model: str = "demo"
    """A directory, a GGUF file, a name in the local Hugging Face cache, or "demo"."""
    served_name: str | None = None
    """What requests call the model; without it the name that it was loaded by."""
    host: str = "127.0.0.1"
    """Where to listen. Beyond loopback, set API keys and put a TLS proxy in front."""
    port: int = 8000
    """The port; 0 takes a free one and logs it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; with auto or cuda each replica takes a GPU of its own, in turn."""
    precision: str = "auto"
    """auto (the checkpoint's own on a GPU, fp32 on a CPU), fp32, bf16 or fp16; on a GPU also int8, int4 or fp8."""
    num_threads: int | None = None
    """Threads of each engine on a CPU; without it torch's own choice."""
    replicas: int = 1
    """Engine processes, one a GPU; a prompt goes where its beginning was seen last."""
    max_queue: int = 64
    """Choices that may wait beside those that run (max_rows a replica); beyond, requests get 429."""
    max_answer_tokens: int | None = None
    """Most tokens that a request may ask for; without it the context alone ends an answer."""
    max_body_bytes: int = 2 << 20
    """Largest request body."""
    request_timeout_s: float = 600.0
    """Longest time from a request's arrival to its answer's end."""
    client_timeout_s: float = 30.0
    """Longest wait for a client: for the rest of its request's body, or for it to read on."""
    engine_timeout_s: float = 120.0
    """Longest silence of an engine that is loaded before it counts as dead."""
    drain_s: float = 30.0
    """After SIGTERM, how long what runs or waits may take to end."""
    api_key_file: Path | None = None
    """A file of API keys, one a line; $MICROLLM_API_KEY is one more. Without any key, everybody may ask."""
    checkpoint_sampling: bool = False
    """Start from the sampling parameters that the checkpoint's author published, where a request names none."""
    allow_control_tokens: bool = False
    """Let message content spell control tokens of the chat template, and so forge turns."""
    prewarm: bool = True
    """Make a GPU's steps ready before the first request is let in; a CPU has nothing to make."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        least = {
            "port": 0, "replicas": 1, "max_queue": 0, "max_body_bytes": 1024, "request_timeout_s": 1e-3,
            "client_timeout_s": 1e-3, "engine_timeout_s": 1, "drain_s": 0,
        }  # fmt: skip
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ConfigError(f"got {name}={getattr(self, name)!r}; need at least {low:g}")
        if self.port > 65535 or (self.max_answer_tokens is not None and self.max_answer_tokens < 1):
            raise ConfigError(
                f"got port={self.port}, max_answer_tokens={self.max_answer_tokens}; need 0 to 65535, and at least 1"
            )

    @property
    def capacity(self) -> int:
        """Return how many choices may run and wait at once."""
        return self.replicas * self.engine.num_rows + self.max_queue

    def api_keys(self) -> list[str]:
        """Return the keys of the file and of the environment; none lets everybody in.

        Raises:
            ConfigError: the file cannot be read or holds no key.
        """
        keys = [key] if (key := os.environ.get("MICROLLM_API_KEY", "").strip()) else []
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"got API key file {self.api_key_file}: {error}; need a readable text file"
                ) from error
            found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not found:
                raise ConfigError(
                    f"got no key in {self.api_key_file}; need one a line; without the flag, none is asked for"
                )
            keys += found
        return keys
