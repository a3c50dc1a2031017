"""``microllm profile``: where a steady step of another command spends its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from microllm.lab.profile import ProfileConfig

PROFILED = ("generate",)
"""The commands that can be profiled."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Show where a steady step spends its time: microllm profile -- generate --model demo --prompt "Hello".

    The run's lengths are this command's; --max-tokens, --stop and --json of the other are left aside.
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """After "--", the command to profile, with its own options: generate ..."""
    config: ProfileConfig = field(default_factory=ProfileConfig)
    output: Path | None = None
    """A directory for profile.json, profile.txt and timeline.json, which ui.perfetto.dev opens."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of the table."""

    def run(self) -> int:
        """Print the profile; 0 when its shares add up (else it is refused)."""
        from microllm.cli import parse_command
        from microllm.errors import ConfigError
        from microllm.lab.profile import describe_profile, profile_generation, write_profile

        name = self.command[0] if self.command else ""
        if name not in PROFILED:
            raise ConfigError(
                f"got {f'command {name!r}' if name else 'no command'} to profile; need one of {', '.join(PROFILED)}; "
                'try: microllm profile -- generate --prompt "Hello"'
            )
        target = parse_command(name, list(self.command[1:]), prog=f"microllm profile -- {name}")
        llm, prompt = target.load()
        profile, timeline = profile_generation(llm, prompt, target.sampling, self.config)
        print(profile.model_dump_json() if self.as_json else describe_profile(profile))
        if self.output is not None:
            write_profile(self.output, profile, timeline)
            if not self.as_json:
                print(f"\nwritten to {self.output}")
        return 0
