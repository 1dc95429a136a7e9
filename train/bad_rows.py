"""Rows that cannot be used: counted, named, skipped, up to a limit."""

from train.errors import TrainingError

_NAMED = 20  # rows that are named in the report; the rest are counted


class BadRowError(ValueError):
    """One row cannot be used; the message says why, as a phrase: "has no key 'text'"."""


class BadRows:
    """The unusable rows of one source."""

    def __init__(self, limit: int) -> None:
        """`limit` rows may be unusable (data.max_bad_rows)."""
        self.count, self._limit = 0, limit
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

    def report(self) -> str:
        """One line, empty if there were none: "2 unusable rows skipped: a.jsonl:3 is no JSON; ..."."""
        if not self.count:
            return ""
        more = f"; and {self.count - _NAMED} more" if self.count > _NAMED else ""
        rows = "row" if self.count == 1 else "rows"
        return f"{self.count} unusable {rows} skipped: {'; '.join(self._named)}{more}"
