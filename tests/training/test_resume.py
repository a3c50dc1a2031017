"""Interrupted runs end as uninterrupted ones do, bit for bit; damaged checkpoints are refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_files import assert_same_end, steps
from safetensors.torch import load_file

from microllm.errors import CheckpointError, ConfigError, TrainingError
from microllm.model import Transformer
from microllm.training import OptimizerConfig, ScheduleConfig, Trainer, train
from microllm.training.checkpoints import latest_checkpoint, open_complete
from microllm.training.dataset import Dataset
from microllm.training.network import TrainBlock


def test_five_and_five_steps_are_ten(make_config, tmp_path):
    rest = {
        "optimizer": OptimizerConfig(moments="bf16", stochastic_rounding=True, clip_norm=0.5),
        "schedule": ScheduleConfig(schedule="wsd", warmup_steps=3), "checkpoint_every": 100, "micro_rows": 3,
        "num_steps": 10,
    }  # fmt: skip
    whole, parts = make_config(output=tmp_path / "whole", **rest), tmp_path / "parts"
    assert train(whole)["step"] == 10
    assert train(make_config(output=parts, stop_at=5, **rest)) == {"kind": "end", "step": 5, "stopped": False}
    torch.rand(3)  # whatever happens between two processes
    train(make_config(output=parts, **rest))
    assert_same_end(whole.output, parts, 10)
    assert train(make_config(output=parts, **rest))["step"] == 10  # a run that is done stays as it is
    assert_same_end(whole.output, parts, 10)


KILLED = """
import os, signal, sys
from pathlib import Path
from microllm.training import TrainConfig, OptimizerConfig, train
from microllm.training import checkpoints, trainer
at, data, output = sys.argv[1], *map(Path, sys.argv[2:])
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
real = checkpoints.write_bytes
def write(path, content):
    if path.parent.name == "step-00000050" and path.name == at: die()
    real(path, content)
checkpoints.write_bytes = write
def show(row):
    if row["kind"] == "step" and at == "steps" and row["step"] == 57: die()
config = TrainConfig(
    data=data, output=output, model="tiny", num_steps=100, row_tokens=16, batch_rows=2, device="cpu",
    deterministic=True, checkpoint_every=25, optimizer=OptimizerConfig(learning_rate=3e-3),
)
train(config, show)
"""


def run_killed(at, packed, output):
    """Run in a process of its own, which kills itself while it trains or while it writes its checkpoint of step 50."""
    return subprocess.run(
        [sys.executable, "-c", KILLED, at, str(packed), str(output)], capture_output=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def uninterrupted(packed, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    assert run_killed("never", packed, output).returncode == 0
    return output


@pytest.mark.slow
@pytest.mark.parametrize(("at", "left"), [("steps", 50), ("complete", 25)])
def test_a_hundred_steps_survive_a_kill(at, left, packed, tmp_path, uninterrupted):
    killed = run_killed(at, packed, tmp_path / "run")
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    complete, _ = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert complete is not None
    assert complete.step == left
    again = run_killed("never", packed, tmp_path / "run")
    assert again.returncode == 0, again.stderr.decode()
    assert_same_end(uninterrupted, tmp_path / "run", 100)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.fixture(scope="module")
def two_checkpoints(packed, tmp_path_factory):
    from microllm.training import TrainConfig

    output = tmp_path_factory.mktemp("two") / "run"
    train(TrainConfig(
        data=packed, output=output, model="tiny", num_steps=4, row_tokens=16, batch_rows=2, device="cpu",
        checkpoint_every=2,
    ))  # fmt: skip
    return output / "checkpoints"


def copied(directory, target):
    for path in directory.rglob("*"):
        if path.is_file():
            (target / path.relative_to(directory)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(directory)).write_bytes(path.read_bytes())
    return target


def names(two_checkpoints):
    return sorted(path.name for path in (two_checkpoints / "step-00000004").iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_every_damaged_file_is_refused_and_the_previous_checkpoint_taken(damage, two_checkpoints, tmp_path):
    assert len(names(two_checkpoints)) >= 8
    for number, name in enumerate(names(two_checkpoints)):
        place = copied(two_checkpoints, tmp_path / str(number))
        path = place / "step-00000004" / name
        data = bytearray(path.read_bytes())
        match damage:
            case "cut":
                path.write_bytes(data[:-1] if name != "complete" else data[:-2])
            case "flip":
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
            case "gone":
                path.unlink()
            case _:
                path.write_bytes(b"")
        complete, refused = latest_checkpoint(place)
        assert complete is not None
        assert complete.step == 2, name
        assert len(refused) == 1
        assert "step-00000004" in refused[0]


def test_one_file_too_many_is_refused(two_checkpoints, tmp_path):
    place = copied(two_checkpoints, tmp_path / "c")
    (place / "step-00000004" / "model-00002-of-00002.safetensors").write_bytes(b"x")
    complete, refused = latest_checkpoint(place)
    assert complete is not None
    assert complete.step == 2
    assert "too many" in refused[0]


def test_a_damaged_newest_checkpoint_is_told_and_its_steps_done_again(make_config):
    config = make_config(num_steps=4, checkpoint_every=2)
    train(config)
    want = steps(config.output)
    bad = config.output / "checkpoints/step-00000004/model.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    rows = []
    train(config, rows.append)
    assert [r["reason"].split(":")[0] for r in rows if r["kind"] == "refused"] == ["step-00000004"]
    assert steps(config.output) == want
    assert open_complete(bad.parent).step == 4


def test_nothing_whole_is_an_error_and_not_a_new_beginning(make_config):
    config = make_config(num_steps=1)
    train(config)
    weights = config.output / "checkpoints/step-00000001/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="step-00000001"):
        train(config)


def test_a_first_checkpoint_that_was_never_ended_is_begun_anew(make_config):
    config = make_config(num_steps=2)
    train(config)
    want = steps(config.output)
    (config.output / "checkpoints/step-00000002/complete").unlink()
    rows = []
    train(config, rows.append)
    assert "writing did not end" in rows[0]["reason"]
    assert steps(config.output) == want


def test_a_run_that_another_process_trains_is_refused(make_config):
    from microllm.errors import EvidenceError
    from microllm.evidence.journal import exclusive

    config = make_config(num_steps=1)
    config.output.mkdir()
    (config.output / ".lock").touch()
    with exclusive(config.output / ".lock", ""), pytest.raises(EvidenceError, match="another process"):
        train(config)


def test_a_file_size_limit_of_the_system_leaves_the_previous_checkpoint(make_config):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def show(row):
        if row["kind"] == "checkpoint":  # the next file above a megabyte cannot be written
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))

    config = make_config(num_steps=4, checkpoint_every=2)
    try:
        with pytest.raises(CheckpointError, match="writing model"):
            train(config, show)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    complete, refused = latest_checkpoint(config.output / "checkpoints")
    assert complete is not None
    assert (complete.step, refused) == (2, [])
    assert train(config)["step"] == 4


@pytest.mark.parametrize("content", ["a\n\nb\n", "the king\n"])
def test_odd_little_data(content, make_config, tokenizer, tmp_path):
    (tmp_path / "odd.txt").write_text(content)
    rows = []
    config = make_config(data=tmp_path / "odd.txt", num_steps=3, batch_rows=5, row_tokens=64, checkpoint_every=9)
    train(config, rows.append)  # less than one row: it comes again and again
    assert [row["num_targets"] for row in rows if row["kind"] == "step"] == [rows[0]["num_targets"]] * 3
    assert rows[0]["loss"] > 0


def test_data_without_a_target_is_refused(make_config, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "the"}]}\n')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer / name).read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    from microllm.errors import DataError
    from microllm.training import PackConfig, pack_data

    pack_data(PackConfig(
        input=(path,), output=tmp_path / "data", tokenizer=str(tmp_path), validation_fraction=0
    ))  # fmt: skip
    with pytest.raises(DataError, match="without a target"):
        train(make_config(data=tmp_path / "data"))


def test_another_config_is_refused_with_its_fields(make_config):
    train(make_config(num_steps=2))
    with pytest.raises(ConfigError, match=r"batch_rows: recorded 4, now 8.*optimizer.learning_rate: recorded 0.003"):
        train(make_config(num_steps=2, batch_rows=8, optimizer=OptimizerConfig(learning_rate=1e-3)))
    train(make_config(num_steps=2, keep_checkpoints=5, validate_every=1))  # changes nothing of what is learnt


def test_a_newer_format_is_refused_and_an_older_one_read(two_checkpoints, tmp_path):
    place = copied(two_checkpoints, tmp_path / "c")
    state = place / "step-00000004/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format_version": 2}))
    import hashlib

    (place / "step-00000004/complete").write_text(hashlib.sha256(state.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="update microllm"):
        latest_checkpoint(place)
    stored = Path(__file__).parent / "format-1" / "step-00000002"
    complete = open_complete(stored)
    assert complete.step == 2
    assert complete.record["format_version"] == 1
    assert complete.tensors("optimizer.safetensors")["exp_avg.norm.weight"].shape == (8,)


def test_only_so_many_checkpoints_are_kept(make_config):
    config = make_config(num_steps=6, checkpoint_every=1, keep_checkpoints=3)
    train(config)
    assert sorted(p.name for p in (config.output / "checkpoints").iterdir()) == [
        f"step-{n:08d}" for n in (4, 5, 6)
    ]  # fmt: skip


def test_a_full_disk_leaves_the_previous_checkpoint(make_config, monkeypatch):
    from microllm.io import safetensors_files

    config = make_config(num_steps=4, checkpoint_every=2)
    real = safetensors_files.save_file

    def full(contents, path, metadata):
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        real(contents, path, metadata=metadata)

    monkeypatch.setattr(safetensors_files, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        train(config)
    complete, refused = latest_checkpoint(config.output / "checkpoints")
    assert complete is not None
    assert (complete.step, refused) == (2, [])
    assert [p.name for p in (config.output / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("where", ["loss", "gradient", "parameter"])
def test_a_number_that_is_not_finite_stops_before_the_step(where, make_config, monkeypatch):
    config = make_config(num_steps=6, checkpoint_every=2)
    train(make_config(num_steps=6, checkpoint_every=2, stop_at=3))
    before = load_file(config.output / "checkpoints/step-00000003/model.safetensors")
    if where == "loss":
        real = TrainBlock.forward

        def broken(self, *args):
            x, addend = real(self, *args)
            return x, addend * float("nan") if self.block.self_attn.layer == 1 else addend

        monkeypatch.setattr(TrainBlock, "forward", broken)
        need = "output of layers.1"
    elif where == "gradient":
        batch = Dataset.batch

        def heavy(self, rows, num_rows):
            found = batch(self, rows, num_rows)
            return found._replace(weights_N=found.weights_N * 3e38)

        monkeypatch.setattr(Dataset, "batch", heavy)
        need = "gradient|loss"
    else:
        refresh = Trainer._train_step

        def poisoned(self):
            if self.step == 4:
                self.built.parameters["layers.0.mlp.up_proj.weight"].data[0, 0] = float("inf")
            return refresh(self)

        monkeypatch.setattr(Trainer, "_train_step", poisoned)
        need = "parameter layers.0.mlp.up_proj.weight"
    with pytest.raises(TrainingError, match=need):
        train(config)
    complete, _ = latest_checkpoint(config.output / "checkpoints")
    assert complete is not None
    assert complete.step == (4 if where == "parameter" else 3)
    if where != "parameter":
        after = load_file(complete.path / "model.safetensors")
        assert all(t.equal(before[name]) for name, t in after.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(number, make_config):
    config = make_config(num_steps=50, checkpoint_every=100)

    def show(row):
        if row["kind"] == "step" and row["step"] == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    end = train(config, show)
    assert end["stopped"]
    assert 3 <= end["step"] <= 6
    assert signal.getsignal(number) is before
    complete, _ = latest_checkpoint(config.output / "checkpoints")
    assert complete is not None
    assert complete.step == end["step"]


def test_a_checkpoint_is_a_model_that_transformers_loads(make_config):
    import transformers

    from microllm.io.checkpoint import open_checkpoint
    from microllm.io.resolve import resolve_model
    from microllm.model import load_model

    config = make_config(num_steps=2)
    train(config)
    path = config.output / "checkpoints/step-00000002"
    ids = torch.tensor([[5, 9, 40, 2]])
    ours = load_model(open_checkpoint(resolve_model(str(path))))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert isinstance(ours, Transformer)
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)
    text = transformers.AutoTokenizer.from_pretrained(path)
    assert text.decode(text("the king said").input_ids) == "the king said"


def test_training_overfits_one_batch(make_config):
    config = make_config(
        num_steps=60, batch_rows=2, row_tokens=32, checkpoint_every=100, optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    real = Dataset.rows_of_step
    try:
        Dataset.rows_of_step = lambda self, step, batch_rows, seed: real(self, 0, batch_rows, seed)
        train(config)
    finally:
        Dataset.rows_of_step = real
    losses = [row[1] for row in steps(config.output)]
    assert losses[0] > 5
    assert losses[-1] < 0.1


def test_a_tied_head_is_one_tensor_and_one_key(make_config, packed, tmp_path):
    from microllm.config import preset
    from microllm.io.checkpoint import save_checkpoint

    shape = preset("tiny", tie_word_embeddings=True)
    save_checkpoint(tmp_path / "tied", shape, Transformer(shape).initialise(0).state_dict())
    config = make_config(model=str(tmp_path / "tied"), num_steps=4, stop_at=2)
    train(config)
    stored = load_file(config.output / "checkpoints/step-00000002/model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["model.embed_tokens.weight"].shape == (512, 128)
    from microllm.training.ranks import Ranks

    trainer = Trainer(make_config(model=str(tmp_path / "tied"), num_steps=4), Ranks(0, 1, torch.device("cpu")), print)
    assert trainer.step == 2
    assert trainer.built.model.head_weight_VD is trainer.built.model.embed_tokens.weight
    assert trainer.built.model.embed_tokens.weight.equal(stored["model.embed_tokens.weight"])


def test_the_parts_of_a_step_add_up(make_config):
    config = make_config(num_steps=8, row_tokens=64, batch_rows=8)
    rows = []
    train(config, rows.append)
    for row in (r for r in rows if r["kind"] == "step"):
        parts = dict(row["seconds"])
        total = parts.pop("total")
        assert sum(parts.values()) == pytest.approx(total, rel=0.02, abs=5e-4)
        assert row["mfu"] is None  # the device's peak is not known
