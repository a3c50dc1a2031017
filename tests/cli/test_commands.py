"""Every command as a person or a script meets it: what it prints, what it refuses, how it ends."""

import contextlib
import dataclasses
import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import torch

from microllm.cli import COMMANDS, command_class, main
from microllm.sampling import SamplingParams


def run_json(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_json_has_the_fields_that_scripts_read(capsys, tiny):
    words = ("generate", "--model", tiny, "--prompt", "hello", "--temperature", "0", "--max-tokens", "5")
    found = run_json(capsys, *words)
    assert {"text", "token_ids", "prompt_token_ids", "finish_reason", "timings"} <= set(found)
    assert len(found["token_ids"]) == 5
    assert found["finish_reason"] == "length"
    assert found["timings"]["ttft_ms"] > 0
    assert run_json(capsys, *words)["token_ids"] == found["token_ids"]


def test_the_chat_template_is_applied_unless_raw(capsys, tiny):
    words = ("generate", "--model", tiny, "--prompt", "hi", "--max-tokens", "1")
    raw = run_json(capsys, *words, "--raw")["prompt_token_ids"]
    assert len(raw) == 2
    assert len(run_json(capsys, *words)["prompt_token_ids"]) == len("<|user|>hi<|assistant|>")
    system = run_json(capsys, *words, "--system", "be kind")["prompt_token_ids"]
    assert len(system) == len("<|system|>be kind<|user|>hi<|assistant|>")


def test_pieces_on_the_terminal_are_the_text_of_the_json(capsys, tiny):
    words = ["generate", "--model", tiny, "--prompt", "stream", "--seed", "5", "--max-tokens", "20"]
    text = run_json(capsys, *words)["text"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out == text + "\n"
    assert "tokens/s" in shown.err


def test_several_choices_and_prompt_logprobs(capsys, tiny):
    words = ("generate", "--model", tiny, "--prompt", "ab", "--raw", "--seed", "1", "--max-tokens", "3")
    choices = run_json(capsys, *words, "--n", "3")["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert len({tuple(c["token_ids"]) for c in choices}) > 1
    logprobs = run_json(capsys, *words, "--prompt-logprobs", "2")["prompt_logprobs"]
    assert logprobs[0] is None
    assert logprobs[1]["logprob"] < 0
    assert len(logprobs[1]["top"]) == 2
    assert main([*words, "--prompt-logprobs", "2"]) == 0
    assert "first token" in capsys.readouterr().out


def test_the_prompt_can_come_from_standard_input(capsys, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", __import__("io").StringIO("abc"))
    found = run_json(capsys, "generate", "--model", tiny, "--prompt", "-", "--raw", "--max-tokens", "1")
    assert len(found["prompt_token_ids"]) == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--prompt", ""], "got an empty prompt; need some text"),
        (["--prompt", "x" * 100], "got a prompt of 121 tokens; need at most 63"),
        (["--prompt", "x", "--device", "tpu"], "got device 'tpu'; need auto, cpu, cuda"),
        (["--prompt", "x", "--precision", "fp8"], "got precision 'fp8'; need auto"),
        (["--prompt", "x", "--stop-token-ids", "9999"], "got token ids"),
        (["--prompt", "x", "--raw", "--system", "y"], "got --system with --raw"),
    ],
)
def test_bad_requests_end_in_one_line(capsys, tiny, words, complaint):
    assert main(["generate", "--model", tiny, *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"microllm: {complaint}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--temperature", "-1"], "need a number from 0 to 100"),
        (["--temperature", "nan"], "need a number from 0 to 100"),
        (["--max-tokens", "0"], "LLM.score()"),
        (["--max-tokens", "many"], "many"),
        (["--tempratur", "1"], "--temperature"),
    ],
)
def test_bad_options_name_the_option_and_the_way_out(capsys, words, complaint):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--model", "demo", "--prompt", "x", *words])
    assert stopped.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert complaint in shown


def test_a_model_that_is_not_there_suggests_near_names(capsys, tmp_path):
    assert main(["inspect", "--model", "dmeo"]) == 2
    assert "did you mean demo?" in capsys.readouterr().err
    assert main(["inspect", "--model", str(tmp_path / "none")]) == 2
    assert "got model" in capsys.readouterr().err


def test_an_unknown_command_suggests_a_near_one(capsys):
    assert main(["genrate"]) == 2
    assert "did you mean 'generate'?" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"microllm {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_every_flag(capsys, name):
    command = command_class(name)
    assert command.__doc__
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_every_sampling_parameter_is_a_flag(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    flags = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(SamplingParams)}
    assert {flag for flag in flags if flag not in shown} == set()


def test_inspect_reads_headers_and_no_weight(capsys, tiny, monkeypatch):
    from microllm.io.safetensors_files import SafetensorsSource

    monkeypatch.setattr(SafetensorsSource, "read", lambda *_: pytest.fail("a weight was read"))
    found = run_json(capsys, "inspect", "--model", tiny)
    assert found["num_parameters"] == 524_928
    assert found["bytes_by_dtype"] == {"float32": 4 * 524_928}
    assert found["kv_bytes_per_token"] == {"float32": 1024, "bfloat16": 512}
    assert found["refused"] == []
    assert main(["inspect", "--model", tiny]) == 0
    assert "524,928" in capsys.readouterr().out


def test_inspect_says_what_would_be_refused(capsys, tiny, tmp_path):
    config = json.loads(pathlib.Path(tiny, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    os.link(f"{tiny}/model.safetensors", tmp_path / "model.safetensors")
    assert main(["inspect", "--model", str(tmp_path), "--json"]) == 1
    (reason,) = json.loads(capsys.readouterr().out)["refused"]
    assert "num_experts" in reason


def test_inspect_says_why_and_keeps_words_that_look_like_markup(capsys, tiny, tmp_path):
    config = json.loads(pathlib.Path(tiny, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "[/red]"}}))
    os.link(f"{tiny}/model.safetensors", tmp_path / "model.safetensors")
    assert main(["inspect", "--model", str(tmp_path)]) == 1
    assert "[/red]" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    assert main(["inspect", "--model", str(tmp_path), "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert "tensor model.layers.0.mlp.up_proj.weight: shape [384, 128], need [7, 128]" in refused


def test_doctor_finds_this_machine(capsys):
    found = {f["what"]: f for f in run_json(capsys, "doctor")["findings"]}
    assert found["torch"]["state"].startswith(torch.__version__)
    absent = [f for f in found.values() if not f["usable"]]
    assert all(f["remedy"] for f in absent)
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


def test_chat_remembers_turns_and_starts_over(capsys, tiny, monkeypatch):
    lines = iter(["ab", "cd", "/new", "ef", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", "--model", tiny, "--max-tokens", "2", "--temperature", "0", "--json"]) == 0
    turns = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    lengths = [len(t["prompt_token_ids"]) for t in turns]
    alone = len("<|user|>ab<|assistant|>")
    assert lengths[0] == lengths[2] == alone
    assert lengths[1] > alone + len("<|user|>cd")


def test_chat_asks_the_model_no_command_it_does_not_know(capsys, tiny, monkeypatch):
    lines = iter(["/help", "/ab/cd", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", "--model", tiny, "--max-tokens", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert "got /help. Commands: /new" in shown.err
    (turn,) = [json.loads(line) for line in shown.out.splitlines()]
    assert len(turn["prompt_token_ids"]) == len("<|user|>/ab/cd<|assistant|>")


def test_a_turn_that_does_not_fit_is_said_and_forgotten(capsys, tiny, monkeypatch):
    lines = iter(["x" * 200, "ab"])

    def type_line(_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_line)
    assert main(["chat", "--model", tiny, "--max-tokens", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert "got a prompt of" in shown.err
    (turn,) = [json.loads(line) for line in shown.out.splitlines()]
    assert len(turn["prompt_token_ids"]) == len("<|user|>ab<|assistant|>")


HEAR_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


@contextlib.contextmanager
def started(command, **streams):
    """Run a command that hears Ctrl-C even where the tests were started in the background; kill it in the end."""
    with subprocess.Popen([sys.executable, "-c", HEAR_CTRL_C, *command], **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_stops_the_answer_and_not_the_program():
    """On a real terminal, with the demo: interrupt a long answer, then leave by command."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "microllm", "chat", "--model", "demo"]
    command += ["--max-tokens", "4000", "--min-tokens", "3999"]
    with started(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as process:
        os.close(terminal)
        seen = read_until(controller, b"> ")
        os.write(controller, b"Tell me a long story.\n")
        seen = read_until(controller, b"story.\r\n", minimum=40)
        process.send_signal(signal.SIGINT)
        seen = read_until(controller, b"finish: cancelled", then=b"> ")
        assert process.poll() is None, seen
        os.write(controller, b"/exit\n")
        assert process.wait(timeout=30) == 0
    os.close(controller)


def read_until(controller, mark, *, then=b"", minimum=0, timeout_s=90):
    """Return what the terminal shows once ``mark`` is there, then ``then``, and ``minimum`` bytes follow the mark."""
    seen, end = b"", time.monotonic() + timeout_s
    while True:
        _, found, rest = seen.partition(mark)
        if found and then in rest and len(rest) >= minimum:
            return seen
        ready, _, _ = select.select([controller], [], [], max(0, end - time.monotonic()))
        assert ready, f"no {mark!r} and {then!r} in {seen[-500:]!r}"
        seen += os.read(controller, 4096)


@pytest.mark.slow
def test_generate_stopped_by_ctrl_c_keeps_what_it_said():
    command = [sys.executable, "-m", "microllm", "generate", "--prompt", "Tell a story.", "--min-tokens", "3999"]
    command += ["--max-tokens", "4000", "--model", "demo"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=60)
    assert process.returncode == 0
    assert first + rest
    assert b"finish: cancelled" in complaint
    assert b"Traceback" not in complaint


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m microllm inspect --model demo | head -1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert "demo" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize("words", ["--version", "generate --help"])
def test_a_reader_that_never_reads_is_no_error(words):
    command = f"{sys.executable} -m microllm {words} | true"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True).stderr == ""


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        ("inspect --model {tiny} > /dev/full", 2, "No space left on device"),
        ("inspect --model {tiny} --json > /dev/full", 2, "No space left on device"),
        ("inspect --model {tiny} --json >&-", 0, ""),
        ("generate --model {tiny} --prompt - <&-", 2, "got an empty prompt"),
        ("chat --model {tiny} <&- > /dev/null", 0, ""),
    ],
)
def test_full_disks_and_closed_streams_end_in_one_line(tiny, words, status, complaint):
    command = f"{sys.executable} -m microllm {words.format(tiny=tiny)}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == status
    assert complaint in run.stderr
    assert run.stderr.count("\n") == bool(complaint)


@pytest.mark.parametrize("words", ["doctor", "generate --model {tiny} --prompt x --seed 1"])
def test_an_output_without_a_character_shows_a_question_mark(tiny, words):
    command = [sys.executable, "-m", "microllm", *words.format(tiny=tiny).split()]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, timeout=120, check=True, env=environment)
    assert b"?" in run.stdout
    assert b"Traceback" not in run.stderr
