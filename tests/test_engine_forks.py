"""Programs that are forks of a Python with its imports made run as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import made_once
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_forks import Forks, written_to
from helpers.forked import run_fork

PROGRAM = """
import json, os, sys, time
print(json.dumps([sys.argv[1:], dict(os.environ), "wave" in sys.modules, os.getpid(), os.getsid(0), sys.path[0]]))
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
"""
#: In another test process: its own `Forks`, of which two forks say who they come from.
OTHER = """
import os, sys, time
from pathlib import Path
from helpers.engine.engine_forks import Forks
forks = Forks("stub", Path(sys.executable), ["wave"], dict(os.environ))
for number in (1, 2):
    fork = forks.fork(sys.argv[1], ["0"], {"PYTHONPATH": "/nowhere"}, Path(sys.argv[2], f"{number}.log"))
    fork.wait(60)
"""
#: The same, which ends while its fork runs.
BEGINS = """
import os, sys
from pathlib import Path
from helpers.engine.engine_forks import Forks
forks = Forks("stub", Path(sys.executable), ["wave"], dict(os.environ))
print(forks.fork(sys.argv[1], [], {"PYTHONPATH": "/nowhere"}, *map(Path, sys.argv[2:])).pid)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(made_once.VARIABLE, str(tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def forks() -> Forks:
    return Forks("stub", Path(sys.executable), ["wave"], dict(os.environ))


def test_a_fork_has_its_own_environment_group_and_log_and_is_ended(program: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fork = forks().fork(str(program), ["1000"], {"PYTHONPATH": "/nowhere", "ONLY": "this"}, log)
    said = eventually(lambda: (text := log.read_text()).endswith("\n") and text)
    arguments, environment, imported, pid, group, first = json.loads(said)
    assert arguments == ["1000"], "seconds that it would take"
    assert environment == {"PYTHONPATH": "/nowhere", "ONLY": "this"}
    assert imported, "it imports what is there already"
    assert (pid, group) == (fork.pid, fork.pid)
    assert first == "/nowhere"
    assert fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.01)
    fork.terminate()
    fork.wait(60)
    assert fork.poll() is not None


ANSWERING = """
import os, sys
for line in sys.stdin:
    print(line.strip(), flush=True)
os.kill(os.getpid(), int(sys.argv[1])) if len(sys.argv) > 1 else sys.exit(3)
"""


@pytest.mark.parametrize(("arguments", "expected"), [([], 3), (["9"], -9)], ids=["ended", "killed"])
def test_a_fork_reads_what_it_is_written_and_its_exit_code_is_known(
    arguments: list[str], expected: int, program: Path, tmp_path: Path
) -> None:
    program.write_text(ANSWERING)
    log, stdin = tmp_path / "log", tmp_path / "stdin"
    with written_to(stdin) as written:
        fork = forks().fork(str(program), arguments, {"PYTHONPATH": "/nowhere"}, log, stdin)
        written.write("one\n")
        written.flush()
        eventually(lambda: log.read_text() == "one\n")
        assert fork.poll() is None
    fork.wait(60)
    assert fork.returncode == expected


def test_a_fork_runs_where_it_is_told_and_its_errors_go_to_a_file_of_their_own(program: Path, tmp_path: Path) -> None:
    program.write_text("import os, sys; print(os.getcwd()); print('wrong', file=sys.stderr)")
    log, errors, place = tmp_path / "log", tmp_path / "errors", tmp_path / "place"
    place.mkdir()
    fork = forks().fork(str(program), [], {"PYTHONPATH": "/nowhere"}, log, errors=errors, directory=place)
    fork.wait(60)
    assert (log.read_text(), errors.read_text()) == (f"{place}\n", "wrong\n")


INTERRUPTED = """
import sys, time
from pathlib import Path
try:
    time.sleep(600)
except KeyboardInterrupt:
    Path(sys.argv[1]).touch()
"""


def test_a_fork_whose_time_is_up_may_end_what_it_has_begun(tmp_path: Path) -> None:
    program, ended = tmp_path / "program.py", tmp_path / "ended"
    program.write_text(INTERRUPTED)
    for seconds in (1.0, 10.0, 100.0):  # until it has come so far, on any machine
        with pytest.raises(subprocess.TimeoutExpired):
            run_fork("command", str(program), str(ended), directory=tmp_path, environment=os.environ, seconds=seconds)
        if ended.exists():
            return
    raise AssertionError("it was killed at once")


def test_what_forks_outlives_who_began_it_by_its_last_fork_whose_exit_code_is_known(
    program: Path, tmp_path: Path
) -> None:
    program.write_text("import sys; sys.stdin.read(); sys.exit(5)")
    stdin = tmp_path / "stdin"
    with written_to(stdin):
        pid = other_process(BEGINS, program, tmp_path / "log", stdin).stdout.strip()
        assert len({*started(tmp_path)} - {int(pid)}) == 1
    eventually((tmp_path / f"stub-forks.{pid}").exists)
    assert (tmp_path / f"stub-forks.{pid}").read_text() == "5"
    eventually(lambda: not started(tmp_path))


def test_test_processes_share_one_and_begin_another_when_it_has_ended(program: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.log"
    forks().fork(str(program), ["0"], {"PYTHONPATH": "/nowhere"}, ours).wait(60)

    def other(where: str) -> None:
        (tmp_path / where).mkdir()
        other_process(OTHER, program, tmp_path / where)
        assert all(json.loads((tmp_path / where / f"{number}.log").read_text())[2] for number in (1, 2))

    begun = started(tmp_path)
    assert len(begun) == 1
    other("beside")
    assert started(tmp_path) == begun, "one imports for all"
    os.kill(begun[0], signal.SIGKILL)
    eventually(lambda: not started(tmp_path))
    other("alone")
    eventually(lambda: not started(tmp_path))  # it ends with the process that began it


def other_process(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))}
    argv = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(argv, env=os.environ | path, check=True, timeout=180, stdout=subprocess.PIPE, text=True)


def started(tmp_path: Path) -> list[int]:
    """Processes that fork for this run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            argv = (place / "cmdline").read_bytes().split(b"\0")
            state = (place / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if os.fsencode(tmp_path / "stub-forks") in argv and state != "Z":
            found.append(int(place.name))
    return found
