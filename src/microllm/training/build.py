"""From a config to what is trained: the model, its copies and adapters, wrapped for the ranks.

Place: the trainer calls ``build`` once. A preset begins at random weights, the same on every device and rank; anything
else is loaded, from whatever format ``io`` reads. Weights are fp32 masters; with adapters the model is frozen, and its
weights are in the precision that computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from microllm.config import ModelConfig
from microllm.errors import ConfigError
from microllm.io.checkpoint import open_checkpoint
from microllm.io.resolve import ModelSource, resolve_model
from microllm.model import Transformer, load_weights
from microllm.training.config import TrainConfig
from microllm.training.dataset import Index
from microllm.training.lora import Adapter, make_adapters
from microllm.training.network import Copies, TrainNetwork
from microllm.training.optimizer import local
from microllm.training.ranks import Ranks


@dataclass
class Built:
    """A model ready to be trained. ``run`` is what is called with rows: the network, or its wrapper for the ranks."""

    config: ModelConfig
    model: Transformer
    network: TrainNetwork
    adapters: dict[int, dict[str, Adapter]]
    copies: Copies
    run: nn.Module
    precision: str

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by name: the model's own names, or the adapters'."""
        named = ((name.removeprefix("model."), p) for name, p in self.network.named_parameters())
        return {name: p for name, p in named if p.requires_grad}


def build(config: TrainConfig, index: Index, ranks: Ranks, on_bucket: Callable[[], None]) -> Built:
    """Return the model that ``config`` names, on this rank's device.

    ``on_bucket`` is called whenever a bucket of gradients is ready to be reduced.

    Raises:
        ConfigError: the data, the model and the config do not fit each other.
        ModelNotFoundError, CheckpointError: there is no such model, or it is damaged.
    """
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if ranks.device.type == "cuda" else "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = _model(config, index)
    _check_fit(config, model.config, index, ranks)
    adapters = make_adapters(model, config.lora, config.seed) if config.lora.lora_rank else {}
    if adapters:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    copies = Copies(dtype)
    network = TrainNetwork(model, copies, adapters, recompute=config.recompute).to(ranks.device)
    if config.compile:
        for block in network.blocks:
            block.compile()
    run: nn.Module = network
    if config.shard:
        _shard(network, dtype, ranks)
    else:
        copies.make(network.parameters())
        if ranks.world > 1:
            run = _replicated(network, ranks.device, on_bucket)
    return Built(model.config, model, network, adapters, copies, run, precision)


def _model(config: TrainConfig, index: Index) -> Transformer:
    if config.preset is not None:
        eos_ids = tuple(index.content["eos_ids"])
        shape = replace(config.preset, dtype="float32", eos_token_ids=eos_ids, bos_token_id=index.content["bos_id"])
        return Transformer(shape).initialise(config.seed)
    return load_fp32(resolve_model(config.model))


def load_fp32(source: ModelSource) -> Transformer:
    """Return a checkpoint's model with fp32 weights that can be trained."""
    checkpoint = open_checkpoint(source)
    model = Transformer(replace(checkpoint.config, dtype="float32"))
    load_weights(model, checkpoint)
    return model


def _check_fit(config: TrainConfig, shape: ModelConfig, index: Index, ranks: Ranks) -> None:
    problems = []
    if index.vocab_size > shape.vocab_size:
        problems.append(f"data of {index.vocab_size} token ids for a vocabulary of {shape.vocab_size}")
    if config.row_tokens > shape.max_position_embeddings:
        problems.append(f"row_tokens={config.row_tokens} for a context of {shape.max_position_embeddings}")
    if config.batch_rows < ranks.world:
        problems.append(f"batch_rows={config.batch_rows} for {ranks.world} ranks")
    if config.shard and (ranks.world == 1 or config.lora.lora_rank):
        problems.append(f"shard with {ranks.world} ranks and lora_rank={config.lora.lora_rank}")
    if problems:
        raise ConfigError(f"got {'; '.join(problems)}; need ids below the vocabulary, rows inside the context, a row a "
                          "rank, and sharding only of a whole model over several ranks")  # fmt: skip


def _replicated(network: TrainNetwork, device: torch.device, on_bucket: Callable[[], None]) -> nn.Module:
    def reduce(group, bucket):  # noqa: ANN001, ANN202  DDP takes its own annotations or none
        on_bucket()
        return allreduce_hook(group, bucket)

    with warnings.catch_warnings():  # newer torch has another name for it, which older torch does not know
        warnings.simplefilter("ignore", FutureWarning)
        # A capture cannot wait for the default stream, and DDP's gradients are made on the stream that it is made on.
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True, broadcast_buffers=False)
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)
    wrapped.register_comm_hook(None, reduce)
    return wrapped


def _shard(network: TrainNetwork, dtype: torch.dtype, ranks: Ranks) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in network.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    done = {p for block in network.blocks for p in block.parameters()}  # the model holds them too, by other paths
    fully_shard(network, mesh=mesh, mp_policy=policy, ignored_params=done)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's whole value, gathered from all ranks where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor, or this rank's share of it."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
        local(tensor).copy_(local(value))
