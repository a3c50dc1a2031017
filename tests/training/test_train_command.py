"""The commands: text to a trained model that generates, in two lines."""

from __future__ import annotations

import json

from microllm.cli import main


def test_text_to_a_model_that_generates(text, tmp_path, capsys):
    run = tmp_path / "run"
    words = f"train --data {text} --output {run} --model tiny --num-steps 4 --row-tokens 32 --batch-rows 4 --device cpu"
    words += " --validate-every 2 --sample-every 4 --sample-prompts the king --sample-tokens 5 --learning-rate 1e-3"
    assert main(words.split()) == 0
    shown = capsys.readouterr().out
    for piece in ("step 4/4 · loss", "MFU (6N+12LHKc) n/a", "validation loss", "checkpoint", "done at step 4"):
        assert piece in shown
    assert (run / "loss.png").stat().st_size > 5000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    assert kinds == [
        "step",
        "step",
        "validation",
        "step",
        "step",
        "validation",
        "sample",
        "sample",
        "checkpoint",
        "end",
    ]
    assert rows[-4]["text"].startswith("the")
    model = str(run / "checkpoints/step-00000004")
    assert main(["generate", "--model", model, "--prompt", "the king", "--raw", "--max-tokens", "3"]) == 0
    again = f"train --data {text} --output {run} --model tiny --num-steps 5 --row-tokens 32 --batch-rows 4 --device cpu"
    assert main([*again.split(), "--learning-rate", "1e-3"]) == 2  # another length is another schedule
    assert "num_steps: recorded 4, now 5" in capsys.readouterr().err


def test_data_commands(text, tmp_path, capsys):
    assert main(f"data tokenizer --input {text} --output {tmp_path / 't'} --vocab-size 300".split()) == 0
    pack = f"data pack --input {text} --output {tmp_path / 'd'} --tokenizer {tmp_path / 't'} --documents line --json"
    capsys.readouterr()
    assert main(pack.split()) == 0
    index = json.loads(capsys.readouterr().out)
    assert index["vocab_size"] == 300
    assert main(pack.split()) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(f"train --data {tmp_path / 'd'} --output {tmp_path / 'r'} --model nothing-there".split()) == 2
    assert main(f"data tokenizer --input {text} --output {tmp_path / 'u'} --vocab-size 9".split()) == 2


def test_a_run_that_is_stopped_before_its_first_step_says_so(packed, tmp_path, capsys, monkeypatch):
    from microllm.training.trainer import Trainer

    monkeypatch.setattr(Trainer, "_train_step", lambda self: None)
    assert main(f"train --data {packed} --output {tmp_path} --model tiny --row-tokens 32 --device cpu".split()) == 0
    shown = capsys.readouterr().out
    assert "no curve" in shown
    assert "stopped; the same command goes on at step 0" in shown


def test_metrics_that_no_run_wrote_are_refused(packed, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    assert main(f"train --data {packed} --output {tmp_path} --model tiny --row-tokens 32 --device cpu".split()) == 2
    assert "no run wrote" in capsys.readouterr().err
    assert (
        main(f"train --data {packed} --output {tmp_path} --model tiny --validate-every 1 --row-tokens 4096".split())
        == 2
    )


def test_tensorboard_names_its_extra(packed, tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    words = f"train --data {packed} --output {tmp_path} --model tiny --row-tokens 32 --device cpu --tensorboard"
    assert main(words.split()) == 2
    assert "microllm[tensorboard]" in capsys.readouterr().err
