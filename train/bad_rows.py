"""Rows that cannot be used: counted, named, skipped, up to a limit."""

from train.errors import TrainingError

_NAMED = 20  # rows that are named in the report; the rest are counted


TOO_DEEP = "is nested too deep to be read"


class BadRowError(ValueError):
    """One row cannot be used; the message says why, as a phrase: "has no key 'text'"."""


class BadRows:
    """The unusable rows of one source, and the empty ones, which do no harm."""

    def __init__(self, limit: int) -> None:
        """`limit` rows may be unusable (data.max_bad_rows)."""
        self.count, self._limit, self._num_empty = 0, limit, 0
        self._named: list[str] = []

    def add(self, name: str, reason: str) -> None:
        """Count the row `name` (a file and line, a dataset and index). Raises `TrainingError` beyond the limit."""
        self.count += 1
        if self.count > self._limit:
            raise TrainingError(
                f"{name} {reason}; unusable rows of this source so far: {self.count}, data.max_bad_rows is "
                f"{self._limit}: mend them or raise it"
            )
        if self.count <= _NAMED:
            self._named.append(f"{name} {reason}")

    def add_empty(self) -> None:
        """Count a row that says nothing; any number of them may be there."""
        self._num_empty += 1

    def report(self) -> str:
        """One line, empty if there were none: "2 unusable rows skipped: a.jsonl:3 is no JSON; ..."."""
        said = []
        if self.count:
            named = [*self._named, *([f"and {self.count - _NAMED} more"] if self.count > _NAMED else [])]
            said.append(f"{self.count} unusable {_rows(self.count)} skipped: {'; '.join(named)}")
        if self._num_empty:
            said.append(f"{self._num_empty} {_rows(self._num_empty)} with an empty text or answer left out")
        return "; ".join(said)


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def check_characters(text: str, column: str) -> None:
    """Raise `BadRowError` for text that no UTF-8 can hold: JSON may escape one half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRowError(f"has half a character (a lone surrogate) in {column!r}") from None
