"""The one exception that the companion's users see: a line that says what is wrong, and how to mend it."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: the CLI prints it as one line on stderr and exits with 2."""

    def __init__(self, problem: str, mend: str = "") -> None:
        self.problem = problem.rstrip(".")
        self.mend = mend.rstrip(".")
        super().__init__(f"{self.problem}. {self.mend}." if mend else f"{self.problem}.")
