"""What the code is as a house: floors and arrows of each package and room, circles, lines, the widest class.

    python benchmarks/house.py [--root CHECKOUT]

An arrow is "imports from", wherever in a file the import stands. What imports from nothing else in its folder is on
floor 1, all else one floor above the highest that it imports from; what imports each other in a circle is on one floor.
A folder's lines include those of the rooms in it.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

PACKAGES: Final = ("service", "drafter", "rl_hooks")
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Arrows = dict[Path, set[Path]]


def imports(root: Path, path: Path) -> set[Path]:
    """The files of the three packages that a file imports from."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {root / name.replace(".", "/") for name in names if name.partition(".")[0] in PACKAGES}
    return {found for file in files for found in (file.with_suffix(".py"), file / "__init__.py") if found.is_file()}


def between(arrows: Arrows, part_of: Callable[[Path], Path | None]) -> Arrows:
    """The arrows between the parts that files belong to; None: the file is of no part."""
    found: Arrows = {}
    for path, targets in arrows.items():
        if (part := part_of(path)) is not None:
            others = {other for target in targets if (other := part_of(target)) is not None}
            found.setdefault(part, set()).update(others - {part})
    return found


def circles(arrows: Arrows) -> list[set[Path]]:
    """Sets of parts each of which can be reached from all others of its set."""
    reach = {part: set(to) for part, to in arrows.items()}
    for middle in reach:
        for part in reach:
            if middle in reach[part]:
                reach[part] |= reach[middle]
    found = [frozenset({part, *(other for other in to if part in reach[other])}) for part, to in reach.items()]
    return [set(one) for one in dict.fromkeys(found) if len(one) > 1]


def floors(arrows: Arrows) -> int:
    """How many floors there are, a circle counted as one part."""
    of = {part: min(circle) for circle in circles(arrows) for part in circle}
    left = between(arrows, lambda part: of.get(part, part))
    count = 0
    while left:
        lowest = {part for part, to in left.items() if not to}
        left = {part: to - lowest for part, to in left.items() if part not in lowest}
        count += 1
    return count


def entry_below(folder: Path) -> Callable[[Path], Path | None]:
    """The entry of a folder, file or room, that a file is or lies in."""

    def entry(path: Path) -> Path | None:
        if not path.is_relative_to(folder) or path == folder / "__init__.py":
            return None
        return folder / path.relative_to(folder).parts[0]

    return entry


def lines(paths: Iterable[Path]) -> Counter[str]:
    """Lines by what they are: code, docstring, comment (alone on its line), blank."""
    found = Counter[str]()
    for path in paths:
        text = path.read_text("utf-8")
        documented, commented = set[int](), set[int]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
                documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                commented.add(token.start[0])
        for number, line in enumerate(text.splitlines(), 1):
            blank = not line.strip()
            kind = "docstring" if number in documented else "comment" if number in commented else "code"
            found["blank" if blank else kind] += 1
    return found


def attributes(node: ast.ClassDef) -> int:
    """How much an object keeps: each `self.x` that `__init__` sets, each field of a dataclass that is not frozen."""
    found = set[str]()
    decorators = [ast.unparse(one) for one in node.decorator_list]
    if any("dataclass" in one and "frozen=True" not in one for one in decorators):
        found = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            stores = [
                one for one in ast.walk(method) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            ]
            found |= {one.attr for one in stores if ast.unparse(one.value) == "self"}
    return len(found)


def widest(paths: Iterable[Path]) -> tuple[int, str]:
    """The class whose objects keep most."""
    classes = [node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    return max((attributes(node), node.name) for node in classes if isinstance(node, ast.ClassDef))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the checkout to measure")
    root = parser.parse_args().root.resolve()
    total = Counter[str]()
    print("| package | files | arrows between files | floors | circles | rooms | arrows between rooms | floors |")
    print("|---|---|---|---|---|---|---|---|")
    found: Mapping[str, Arrows] = {
        package: {path: imports(root, path) for path in sorted((root / package).rglob("*.py"))} for package in PACKAGES
    }
    for package, arrows in found.items():
        own = between(arrows, lambda path: None if path.name == "__init__.py" else path)
        own = {path: to & own.keys() for path, to in own.items() if path in arrows}  # within the package
        rooms = between(arrows, entry_below(root / package))
        counts = [sum(map(len, one.values())) for one in (own, rooms)]
        print(
            f"| {package} | {len(own)} | {counts[0]} | {floors(own)} | {len(circles(own))} "
            f"| {len(rooms)} | {counts[1]} | {floors(rooms)} |"
        )
    print("\n| folder | lines of code | entries | arrows | floors | circles |\n|---|---|---|---|---|---|")
    for arrows in found.values():
        for folder in sorted({path.parent for path in arrows}):
            inside = between(arrows, entry_below(folder))
            code = lines(path for path in arrows if path.is_relative_to(folder))["code"]
            named = "; ".join(" and ".join(sorted(part.stem for part in one)) for one in circles(inside))
            count = sum(map(len, inside.values()))
            if len(inside) > 1:
                name = folder.relative_to(root)
                print(f"| {name} | {code:,} | {len(inside)} | {count} | {floors(inside)} | {named or 0} |")
    print("\n| package | lines | code | docstrings | comments | blank | widest class |\n|---|---|---|---|---|---|---|")
    kinds = ("code", "docstring", "comment", "blank")
    for package, arrows in found.items():
        own_lines, (most, wide) = lines(arrows), widest(arrows)
        total += own_lines
        split = " | ".join(f"{own_lines[kind]:,}" for kind in kinds)
        print(f"| {package} | {own_lines.total():,} | {split} | {wide}: {most} |")
    print(f"| all | {total.total():,} | {' | '.join(f'{total[k]:,}' for k in kinds)} | |")


if __name__ == "__main__":
    main()
