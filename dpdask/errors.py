"""The exception tree: every error says what is wrong, where, and the hint, and carries its exit code.

Messages name columns and public parameters; they never contain a data value or an exact private
count. An error about a value (`DataError`) names no file and no row group; only a line of a CSV
file that cannot be split or decoded is named by its number. An error about a missing, unreadable or
changed file (`InputError`) names the file.

Exit codes and messages are for the steward only: they may depend on private rows, and an analyst
must never see them. Whoever can change a job and see how it ends can ask the table questions that
are not charged unless the ledger is strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


def say_count(n: int, noun: str) -> str:
    """Return a number with its noun.

    Parameters
    ----------
    n
        The number.
    noun
        The noun in the singular, with a plural in s.

    Examples
    --------
    >>> say_count(1, "shard"), say_count(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


SPENT_AGAIN = "choose another output.path; removing this output and running again spends ε again"


def list_names(names: Sequence[str], most: int) -> str:
    """Return names as a text lists them; of many, the first ones and how many more there are.

    Parameters
    ----------
    names
        The names.
    most
        How many are named.
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def quote_names(names: Sequence[str]) -> str:
    """Return names of columns as a message lists them: in quotes, six at most."""
    return list_names([repr(name) for name in names], 6)


class DpdaskError(Exception):
    """The base of all errors of dpdask.

    Parameters
    ----------
    what
        What is wrong, without any data value.
    where
        The file, column or key it concerns.
    hint
        What the user can do about it.

    Examples
    --------
    >>> import dpdask
    >>> error = dpdask.SpecError("ε must be positive", "`epsilon`", "give a number above 0")
    >>> print(error)
    `epsilon`: ε must be positive; give a number above 0
    >>> error.exit_code
    64
    """

    exit_code = 70

    def __init__(self, what: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where, hint)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        return " ".join(f"{where}{self.what}{hint}".split())

    def at(self, where: str) -> Self:
        """Return the same error, placed at `where` (outermost place first)."""
        return type(self)(self.what, f"{where}, {self.where}" if self.where else where, self.hint)


class UsageError(DpdaskError):
    """The command line cannot be understood (exit code 2)."""

    exit_code = 2


class SpecError(DpdaskError):
    """The job, the schema or a parameter is invalid (exit code 64)."""

    exit_code = 64


class CombinedSpecError(SpecError):
    """Several things are wrong with a job or a schema (exit code 64); the message has a line for each.

    Parameters
    ----------
    problems
        What is wrong, at least one.
    """

    def __init__(self, problems: Sequence[SpecError]) -> None:
        first = problems[0]
        super().__init__(first.what, first.where, first.hint)
        self.args = (problems,)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))

    def at(self, where: str) -> Self:
        """Return the same errors, placed at `where`."""
        return type(self)([problem.at(where) for problem in self.problems])


class DataError(DpdaskError):
    """The data violates the schema (exit code 65)."""

    exit_code = 65


class InputError(DpdaskError):
    """The input is missing, unreadable, or changed since the run began (exit code 66)."""

    exit_code = 66


class RepeatedError(InputError):
    """Files hold the same rows (exit code 66): that is an exact fact about rows, so a ledger records the refusal of a run."""


class MissingError(InputError):
    """A file is not there (exit code 66): a store that refuses or does not answer raises something else."""


class InternalError(DpdaskError):
    """A defect of dpdask, or of a library under it (exit code 70); the message names only the type of the failure."""


class OutputError(DpdaskError):
    """The output already exists and was not written by this run, cannot be written, or cannot take the release (exit code 73)."""

    exit_code = 73


class TemporaryError(DpdaskError):
    """A failure that may pass: run the same job again to resume (exit code 75)."""

    exit_code = 75


class BudgetError(DpdaskError):
    """The dataset's privacy budget does not allow the charge; nothing was drawn or charged (exit code 77)."""

    exit_code = 77
