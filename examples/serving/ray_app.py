"""microLLM behind Ray Serve: each replica is the whole server (HTTP application and engine) on a GPU of its own.

    serve run examples.serving.ray_app:deployment      with Ray installed (pip install 'ray[serve]')

Without Ray, ``make_app`` is a plain ASGI application: uvicorn --factory examples.serving.ray_app:make_app
"""

from __future__ import annotations

from fastapi import FastAPI

from microllm.inference import EngineConfig
from microllm.serving.app import build_app
from microllm.serving.server_config import ServerConfig

try:
    from ray import serve
except ImportError:
    serve = None

CONFIG = ServerConfig(model="demo", engine=EngineConfig(max_rows=16))


def make_app() -> FastAPI:
    """Return the application: made where it runs, since an engine's process cannot be sent to another machine."""
    return build_app(CONFIG)


if serve is not None:

    @serve.deployment(
        num_replicas=1, ray_actor_options={"num_gpus": 1}, max_ongoing_requests=80, health_check_period_s=5
    )
    @serve.ingress(make_app)
    class MicroLLM:
        """One replica; Ray sets CUDA_VISIBLE_DEVICES, which the engine's process inherits."""

    deployment = MicroLLM.bind()
