"""Make a model of one's own, save it as Hugging Face does, and load it back."""

import tempfile
from pathlib import Path

import torch

from microllm.config import preset
from microllm.io.checkpoint import open_checkpoint, save_checkpoint
from microllm.io.resolve import resolve_model
from microllm.model import Transformer, load_model

config = preset("model_s")
model = Transformer(config).initialise(seed=0).eval()
print(f"{config.num_parameters():,} parameters, {config.kv_bytes_per_token('bfloat16'):,} KV bytes a token in bf16")

with tempfile.TemporaryDirectory() as folder:
    place = Path(folder) / "mine"
    save_checkpoint(place, config, model.state_dict())
    print(sorted(path.name for path in place.iterdir()))
    again = load_model(open_checkpoint(resolve_model(str(place))))
tokens = torch.arange(10)[None]
with torch.no_grad():
    print("equal logits:", torch.equal(model(tokens), again(tokens)))
