"""Finds the user's own code by its name, ``module:attribute``, and blames it for its errors.

Only the current directory of the process is searched, so a name from Redis cannot make a process import anything else.
`what` is what the code is to its user: a task, an optimizer or a reduction.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kvps.errors import KvpsError, UsageError, shown

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""The name of code of the user's own."""


def load(what: str, name: str, invalid: type[UsageError]) -> Any:
    """Return the attribute that `name` names, of a module in the current directory. Raises `invalid`."""
    if not NAME.fullmatch(name):
        raise invalid(f"{what} must be named module:attribute, not {shown(name)}")
    module_name, _, attribute = name.partition(":")
    module = _import_from_here(what, module_name, name, invalid)
    if not hasattr(module, attribute):
        raise invalid(f"{what} {name!r}: {module.__file__} has no {attribute!r}{near(attribute, vars(module))}")
    return getattr(module, attribute)


def _import_from_here(what: str, module_name: str, name: str, invalid: type[UsageError]) -> ModuleType:
    here = str(Path.cwd())
    top = module_name.split(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [here])
    if spec is None:
        raise invalid(f"{what} {name!r}: there is no module {top!r} in {here}; run kvps where your {what} is")
    loaded = sys.modules.get(top)
    if loaded is not None and getattr(loaded.__spec__, "origin", None) != spec.origin:
        raise invalid(f"{what} {name!r}: a module {top!r} is loaded already from elsewhere; rename yours")
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise invalid(f"{what} {name!r}: importing {module_name} failed: {_in_one_line(error)}") from error


def near(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the name of `names` that is most similar; "" if none is."""
    lower = {each.lower(): each for each in names}
    similar = difflib.get_close_matches(name.lower(), lower, 1)
    return f"; did you mean {lower[similar[0]]}?" if similar else ""


@contextmanager
def blamed(what: str, name: str, failed: type[KvpsError]) -> Iterator[None]:
    """Raise `failed` for an error of the user's code inside the block, in one line that says where in it."""
    try:
        yield
    except KvpsError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        raise failed(
            f"{what} {name!r} failed: {_in_one_line(error)} ({where}; KVPS_TRACEBACK=1 shows all of it)"
        ) from error


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
