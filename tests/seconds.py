"""Which tests are quick: writes the functions that are not into `tests/not_quick.txt`, from pytest's own report.

    make quick ARGS=--junitxml=build/seconds.xml && .venv/bin/python tests/seconds.py build/seconds.xml

A function is quick if its cases took less than `QUICK_SECONDS` on average, setting up included. The report judges the
functions that it names; all others stay as they were. A whole file, where setting up takes long for whichever test is
first, is listed by hand. `conftest.py` marks what is not listed, a new test too, and `make quick` runs that.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from statistics import mean

QUICK_SECONDS = 0.1
NOT_QUICK = Path(__file__).with_name("not_quick.txt")


def judge(report: Path) -> dict[str, bool]:
    """Whether each function of pytest's JUnit `report`, as `path::name`, was quick."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 -- pytest wrote it, here
        path = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[f"{path}::{case.attrib['name'].split('[')[0]}"].append(float(case.attrib["time"]))
    return {name: mean(of_cases) < QUICK_SECONDS for name, of_cases in seconds.items()}


if __name__ == "__main__":
    known = set(NOT_QUICK.read_text().split())
    judged = judge(Path(sys.argv[1]))
    found = sorted({*(known - judged.keys()), *(name for name, quick in judged.items() if not quick)})
    NOT_QUICK.write_text("".join(f"{name}\n" for name in found))
    print(f"{NOT_QUICK}: {len(known)} functions before, {len(found)} now")
