"""Says at the end of a run which stacks it ran, and which not, for want of what: it may be green with nothing run.

STACKS_MADE, from `make stacks`: environments of which each must have run a test, or the run fails.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest

_WANTED = re.compile(r"\.venv-[\w-]+|\w+_SOURCE")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have the reports of a test say in which environment it is."""
    if (mark := item.get_closest_marker("stack")) is not None:
        item.user_properties.append(("stack", mark.args[0]))


def summed_up(reports: list[pytest.TestReport], made: list[str]) -> tuple[str, list[str]]:
    """One line of what was run and what was not; and which of `made` no test ran in."""
    ran: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for report in reports:
        name = dict(report.user_properties).get("stack")
        if report.failed or (report.when == "call" and not report.skipped):
            ran[str(name or "no environment")] += 1
        elif report.skipped and isinstance(report.longrepr, tuple):
            found = _WANTED.search(report.longrepr[2])
            wanted[found[0] if found else "another reason"] += 1
    parts = [", ".join(f"{name} {count}" for name, count in sorted(of.items())) or "none" for of in (ran, wanted)]
    line = f"stacks: tests run, by environment: {parts[0]}; not run, by what is not there: {parts[1]}"
    return line, [name for name in made if not ran[f".venv-{name}"]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """The line, after pytest's own last; fail a run that left out what was made for it."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:
        return
    found = [one for of in reporter.stats.values() for one in of if isinstance(one, pytest.TestReport)]
    ours = [one for one in found if one.nodeid.startswith("tests/stacks/")]
    line, unused = summed_up(ours, os.environ.get("STACKS_MADE", "").split())
    reporter.write_line(line)
    if unused:
        reporter.write_line(
            f"stacks: FAILED: `make stacks` made .venv-{', .venv-'.join(unused)}, and no test ran there"
        )
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
