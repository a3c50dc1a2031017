"""microLLM: run, serve, train and speed up small language models, with the evidence for every number."""
