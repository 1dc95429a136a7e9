"""The two errors a user can cause, printed as one line; anything else is a bug and keeps its traceback."""


class ConfigError(ValueError):
    """A setting is wrong: the message names the key, the value, the limit and the way out."""


class TrainingError(RuntimeError):
    """A run cannot start or go on: the message says what was found, what was kept and what to do."""


def first_line(error: Exception) -> str:
    """What a library's many-lined error says first."""
    return str(error).strip().partition("\n")[0]
