"""The OpenAI-compatible HTTP service: one process for HTTP, one for each engine.

    app.py ── answers.py ── protocol.py          the HTTP process: what comes in, what goes out
       └── router.py ── engine_client.py ─┐
                                          │ wire.py: JSON frames over a socket pair
    engine_process.py ────────────────────┘      one a replica: ``Engine.step`` in a loop

``server.py`` runs ``app.build_app(ServerConfig(...))`` under uvicorn; any other ASGI server may.
"""
