"""Break one weight of a model on purpose, and let the evidence name the layer and the part at fault."""

import copy

import torch

from microllm.config import preset
from microllm.evidence.compare import compare_traces
from microllm.evidence.trace import record
from microllm.model import Transformer

good = Transformer(preset("tiny", num_hidden_layers=6)).initialise(seed=0).eval()
bad = copy.deepcopy(good)
with torch.no_grad():
    bad.layers[3].mlp.up_proj.weight[0, 0] += 0.5

tokens = torch.arange(16)[None]
traces = []
for model in (bad, good):
    with torch.no_grad(), record(model, keep="whole") as trace:
        model(tokens)
    traces.append(trace)
comparison = compare_traces(*traces)
print("passed:", comparison.passed)
print("first fault:", comparison.fault.layer, comparison.fault.substage)
