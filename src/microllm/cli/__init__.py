"""The ``microllm`` command: one file a subcommand, flags from its dataclass, errors as one line.

Exit status: 0 done, 1 a gate failed, 2 a mistake in the call or its input, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tyro

from microllm.errors import MicroLLMError

COMMANDS = (
    "generate", "chat", "inspect", "align", "doctor", "pull", "bench", "probe", "profile", "lab", "serve", "data",
    "train", "attach", "structures", "tune",
)  # fmt: skip


def command_class(name: str) -> Any:  # noqa: ANN401, C901 - dataclasses with nothing in common but run(), a case each
    """Return the dataclass behind a subcommand; only its own file is imported, so that each starts fast."""
    match name:
        case "generate":
            from microllm.cli.generate import Generate as command
        case "chat":
            from microllm.cli.chat import Chat as command
        case "inspect":
            from microllm.cli.inspect import Inspect as command
        case "align":
            from microllm.cli.align import Align as command
        case "doctor":
            from microllm.cli.doctor import Doctor as command
        case "pull":
            from microllm.cli.pull import Pull as command
        case "bench":
            from microllm.cli.bench import Bench as command
        case "probe":
            from microllm.cli.probe import Probe as command
        case "serve":
            from microllm.cli.serve import Serve as command
        case "profile":
            from microllm.cli.profile import Profile as command
        case "data":
            from microllm.cli.data import Data as command
        case "attach":
            from microllm.cli.attach import Attach as command
        case "tune":
            from microllm.cli.tune import Tune as command
        case "structures":
            from microllm.cli.structures import Structures as command
        case "train":
            from microllm.cli.train import Train as command
        case _:
            from microllm.cli.lab import Lab as command
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _prepare_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here and not at exit, where nobody would catch a closed pipe
    except MicroLLMError as error:
        print(f"microllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmicrollm: stopped", file=sys.stderr)
        return 130
    except OSError as error:
        with suppress(OSError):  # what is left in the buffer would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        print(f"microllm: got {error}; need files and an output that can be used; free or name others", file=sys.stderr)
        return 2


def _prepare_streams() -> None:
    """Stand in for closed streams, and let a terminal that lacks a character show "?" for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(importlib.metadata.version("microllm"))
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; microllm --help says what each does"
        print(f"microllm: got command {words[0]!r}; need one of {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    return parse_command(words[0], words[1:], f"microllm {words[0]}").run()


def parse_command(name: str, args: list[str], prog: str) -> Any:  # noqa: ANN401 - as command_class
    """Return the command that ``args`` describe; leave the process, with a text, where they describe none."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
    return tyro.cli(command_class(name), prog=prog, args=args, config=config)


def _overview() -> str:
    lines = ["Run, serve, train and speed up small language models, with the evidence for every number.", ""]
    lines += [f"  microllm {name:<9} {command_class(name).__doc__.splitlines()[0]}" for name in COMMANDS]
    return "\n".join([*lines, "", "microllm COMMAND --help lists a command's options."])
