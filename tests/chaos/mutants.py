"""kvps with one check taken out: what the harness must catch, or it proves nothing.

A mutant is applied in a child alone. Every edit must really change the text: a script that was rewritten must not
turn a control into a test of nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvps import scripts
from kvps.scripts import Script


@dataclass(frozen=True)
class Mutant:
    """`edits` are (script, what stands there, what stands there instead); `patch` changes Python."""

    says: str
    family: str
    edits: tuple[tuple[str, str, str], ...] = ()
    patch: Callable[[], None] | None = None

    def apply(self) -> None:
        """Make this process one of the mutant's."""
        for name, old, new in self.edits:
            text = scripts.SCRIPTS[name].text
            assert text.count(old) == 1, f"{name}.lua does not hold once: {old}"
            scripts.SCRIPTS[name] = Script(name, text.replace(old, new))
            scripts._SHAS[name] = scripts.SCRIPTS[name].sha
        if self.patch:
            self.patch()


MUTANTS: dict[str, Mutant] = {}
