"""Who may call the API: tokens, each with a name, scopes and runs. They come from the settings and from a token file.

The file has one JSON object a line, which `draftalign token` writes:

    {"name": "math-trainer", "scopes": ["write"], "runs": ["math-*"], "sha256": "<64 hex digits>"}

It holds the SHA-256 of each token, and no token. A plain hash is enough: `new_secret` draws 256 random bits, and nobody
can try them all. Salted and slow hashes protect passwords that people think up. `DRAFTALIGN_TOKENS` takes such lines
too.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_hooks.durable import append_line
from service.errors import ConfigurationError
from service.settings import SCOPES, Scope, Settings, regular_file
from service.storage.layout import revalidate

log = logging.getLogger("draftalign.api")

#: Name of a caller where no tokens are configured.
LOOPBACK: Final = "loopback"
ALL_RUNS: Final = ("*",)
_MAX_FILE_BYTES: Final = 1 << 20
#: An editor, or `>`, empties a file before it writes it. So an emptied file counts only after this time.
_REWRITE_SECONDS: Final = 5.0
#: Its inode, size, and times of change in nanoseconds.
_Seen = tuple[int, int, int, int] | None

Pattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9*?][A-Za-z0-9._*?-]{0,63}$")]


@dataclass(frozen=True, slots=True)
class Token:
    """What a caller may do. `runs`: names, or patterns with `*` and `?`. The secret is not in here."""

    name: str
    scopes: frozenset[Scope]
    runs: tuple[str, ...] = ALL_RUNS

    def covers(self, run: str) -> bool:
        """Whether the token may be used for this run."""
        return any(fnmatchcase(run, pattern) for pattern in self.runs)

    @property
    def is_limited(self) -> bool:
        """Whether the token is for some runs only."""
        return "*" not in self.runs


class TokenEntry(BaseModel):
    """A line of the token file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    scopes: frozenset[Scope] = Field(min_length=1)
    runs: tuple[Pattern, ...] = Field(ALL_RUNS, min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def token(self) -> Token:
        """The token of this entry. Scope `admin` includes the other scopes."""
        return Token(self.name, frozenset(SCOPES) if "admin" in self.scopes else self.scopes, self.runs)


def hashed(secret: bytes) -> str:
    """The hash under which a token is kept."""
    return hashlib.sha256(secret).hexdigest()


def new_secret() -> str:
    """A token of 256 random bits."""
    return f"da_{secrets.token_urlsafe(32)}"


def read_entries(path: Path) -> list[TokenEntry]:
    """All entries of a token file. Raises ConfigurationError, which names the line, and OSError."""
    try:
        regular_file(path)  # also while the service runs
    except ValueError as error:
        raise ConfigurationError(f"token file {error}") from None
    with path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"token file {path} has more than {_MAX_FILE_BYTES} bytes")
    return list(_parsed(text.splitlines(), f"token file {path}, line"))


def _parsed(lines: Sequence[str | bytes], where: str) -> Iterator[TokenEntry]:
    """The entries; empty lines are passed over. `where`: what an error says before the line's number."""
    names, digests = {LOOPBACK}, set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = TokenEntry.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "line"
            raise ConfigurationError(f"{where} {number}: {field}: {first['msg']}") from None
        if entry.name in names or entry.sha256 in digests:
            raise ConfigurationError(f"{where} {number}: name {entry.name!r} or its hash is taken")
        names.add(entry.name)
        digests.add(entry.sha256)
        yield entry


def append_entry(path: Path, entry: TokenEntry) -> None:
    """Add an entry to a token file, and make the file if there is none. Raises ConfigurationError if the name is taken.

    A running service knows the entry from its next request on.
    """
    known = read_entries(path) if path.exists() else []
    if any(entry.name == one.name for one in known):
        raise ConfigurationError(f"{path} has a token {entry.name!r} already; take another name, or delete that line")
    append_line(path, entry.model_dump_json().encode(), mode=0o600)


class Tokens:
    """All tokens that are valid now. Each request compares the file's inode, size and times.

    If the file is broken, gone or was just emptied, the tokens of its last good state stay valid, and `trouble` says
    why.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError where the file or an entry of the settings is broken: no earlier state is known."""
        self._path = settings.token_file
        self._fixed = dict(_of_settings(settings))
        self._of_file: dict[str, Token] = {}
        self._seen: _Seen = None
        self._believed_at = math.inf  # monotonic time from which on an emptied file counts
        #: Why the file's present state is not used; None: it is used.
        self.trouble: str | None = None
        #: Whether callers need a token. With a file they do, also when it is empty.
        self.required = bool(self._fixed) or self._path is not None
        if self._path is not None:
            self._refresh(self._path)
            if self.trouble is not None:
                raise ConfigurationError(self.trouble)

    def find(self, secret: bytes) -> Token | None:
        """The token with this secret. Hashes are looked up, so the time that takes reveals nothing of other tokens."""
        if self._path is not None:
            self._refresh(self._path)
        digest = hashed(secret)
        return self._fixed.get(digest) or self._of_file.get(digest)

    def holds(self, token: Token) -> bool:
        """Whether a token that was found earlier is still valid, with the same scopes and runs."""
        if self._path is not None:
            self._refresh(self._path)
        return token in self._fixed.values() or token in self._of_file.values()

    def share_of_runs(self, token: Token, most: int) -> int:
        """How many runs may exist among those that a token is for, if `most` may exist in all.

        Limited tokens (scope write) that are for the same runs have one share together. One more share is left over for
        unlimited tokens, which may take all.
        """
        if not token.is_limited:
            return most
        known = [*self._fixed.values(), *self._of_file.values()]
        limits = {frozenset(one.runs) for one in known if one.is_limited and "write" in one.scopes}
        return max(1, most // (len(limits) + 1))

    def _refresh(self, path: Path) -> None:
        seen, now = _look(path), time.monotonic()
        changed = seen != self._seen
        if not changed and now < self._believed_at and (seen is not None or self.trouble is not None):
            return
        self._seen, self._believed_at = seen, math.inf
        try:
            found = {entry.sha256: entry.token for entry in read_entries(path)}
            self._check_apart(path, found)
        except (ConfigurationError, OSError) as error:
            self._keep(path, str(error) if isinstance(error, ConfigurationError) else f"token file {path}: {error}")
            if isinstance(error, OSError):  # of this moment, maybe: too many files are open. The next request reads it
                self._seen = None
            return
        if changed and self._of_file and not found:
            self._believed_at = now + _REWRITE_SECONDS
            self._keep(path, f"token file {path} is empty, which counts after {_REWRITE_SECONDS:.0f} s")
            return
        if self.trouble is not None or self._of_file:
            log.info("token file %s was read again: %d tokens", path, len(found))
        self.trouble, self._of_file = None, found

    def _check_apart(self, path: Path, found: Mapping[str, Token]) -> None:
        """Raise ConfigurationError where a name or hash is in DRAFTALIGN_TOKENS as well, perhaps with other scopes."""
        names = {token.name for token in self._fixed.values()}
        for digest, token in found.items():
            if token.name in names or digest in self._fixed:
                raise ConfigurationError(
                    f"token file {path}: name {token.name!r} or its hash is in DRAFTALIGN_TOKENS as well; delete one"
                )

    def _keep(self, path: Path, trouble: str) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if self._of_file:
            log.error("%s; the tokens that were valid before it changed stay valid", trouble)
        else:
            make = f"draftalign token NAME --scope admin --file {path}"
            log.error("%s; no token of it is valid. `%s` makes one", trouble, make)


def _look(path: Path) -> _Seen:
    revalidate(path.parent)
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _of_settings(settings: Settings) -> Iterator[tuple[str, Token]]:
    entries, plain = settings.token_entries(), settings.token_scopes()
    # Plain entries become empty lines, so that the number in an error counts all entries.
    parsed = _parsed([e if e.startswith("{") else "" for e in entries], "DRAFTALIGN_TOKENS, entry")
    lines = {entry.sha256: entry.token for entry in parsed}
    yield from lines.items()
    numbers = (number for number, entry in enumerate(entries, 1) if not entry.startswith("{"))
    for number, (secret, scopes) in zip(numbers, plain.items(), strict=True):
        if (digest := hashed(secret.encode())) in lines:
            raise ConfigurationError(f"DRAFTALIGN_TOKENS, entry {number}: its hash is there as well; delete one")
        yield digest, Token(f"DRAFTALIGN_TOKENS[{number}]", scopes)
