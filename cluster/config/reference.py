"""The page on settings and exit codes, out of their declarations: `python -m cluster.config.reference`."""

import sys
from collections.abc import Iterator

from cluster.config.args import EngineArgs
from cluster.config.serve_args import ServeArgs
from cluster.config.setting import Declared, declared
from cluster.config.sources import OTHER_VARIABLES
from cluster.errors import EXIT_CODES

_INTRODUCTION = """\
# Settings

Written by `python -m cluster.config.reference > docs/settings.md`; a test compares the two.

A setting is given as a flag, as a variable of the environment, as a line of the YAML file that `--config`
names, or as a keyword of `LLM`. A flag or keyword wins over the environment, which wins over the file, which
wins over the default. `latentray config show` prints every final value and where it came from; an illegal
value is refused with the name under which it was given. Switches are `--NAME` and `--no-NAME`, in variables
and files `true` and `false`.
"""


def settings_page() -> str:
    """Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    settings = declared(ServeArgs)
    for group in dict.fromkeys(setting.group for setting in settings.values()):
        yield f"## {group}"
        yield ""
        if not any(setting.group == group for setting in declared(EngineArgs).values()):
            yield "Of `serve`, `demo` and `doctor`."
            yield ""
        yield "| flag | variable | default | legal | meaning |"
        yield "|---|---|---|---|---|"
        yield from (_row(setting) for setting in settings.values() if setting.group == group)
        yield ""
    yield "## Other variables"
    yield ""
    yield "| variable | meaning |"
    yield "|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in OTHER_VARIABLES.items())
    yield ""
    yield "## Exit codes"
    yield ""
    yield "| code | meaning |"
    yield "|---|---|"
    yield from (f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())


def _row(setting: Declared) -> str:
    flags = f"`{setting.flag}`" + (f", `{setting.short}`" if setting.short else "")
    cells = (flags, f"`{setting.variable}`", setting.default, setting.rule, setting.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
