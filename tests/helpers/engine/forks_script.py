"""`python -P forks_script.py SOCKET MODULE...` imports the modules once; each program asked for is a fork of it.

Run by an engine's Python, or ours. It says a line when it is ready. Who connects to SOCKET sends a JSON object: the
`program` (a module, or a file that ends in .py), its `arguments`, the whole `environment`, its `directory`, its
`stdin`, the `log`, and the file of its `errors`, which may be the log. The answer is the program's process id. When
that has ended, the file SOCKET.PID holds its exit code, as subprocess counts: of a signal, its number below zero. It
ends when its stdin and the programs have.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    """Answer until stdin ends; in a fork, run the program."""
    place, *modules = sys.argv[1:]
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # what was imported stays: no fork looks through it for garbage, at its start or end
    gc.enable()
    signal.signal(signal.SIGCHLD, lambda *_: note_ends(place, os.WNOHANG))
    with socket.create_server(place, family=socket.AF_UNIX) as server:
        print("ready", flush=True)
        while server in select.select([server, sys.stdin], [], [])[0]:
            with server.accept()[0] as asking, asking.makefile("rw") as line:
                asked = json.loads(line.readline())
                pid = os.fork()
                if pid:
                    line.write(f"{pid}\n")
                    continue
            break
        else:
            asked = None
    if asked is None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        note_ends(place, 0)
    else:
        become(**asked)


def note_ends(place: str, options: int) -> None:
    """Write the exit code of each fork that has ended; of all of them with `options` 0, for which it waits."""
    while True:
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:  # there is none
            return
        if not pid:
            return
        part = Path(f"{place}.{pid}.part")
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(f"{place}.{pid}")


def become(
    program: str, arguments: list[str], environment: dict[str, str], directory: str, stdin: str, log: str, errors: str
) -> None:
    """Run the program as a process of its own would, but for what is imported already."""
    os.setsid()  # one group: its own processes go when it is killed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    read, written = os.open(stdin, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    wrong = written if errors == log else os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((read, written, wrong)):
        os.dup2(file, number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [place for place in environment["PYTHONPATH"].split(os.pathsep) if place not in sys.path]
    sys.argv = [program, *arguments]
    random.seed()  # forks draw differently, as processes of their own do
    for name in ("torch", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    run(program, run_name="__main__")


if __name__ == "__main__":
    main()
