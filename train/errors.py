"""The two errors a user can cause, printed as one line; anything else is a bug and keeps its traceback.

With them, the checks of settings that raise the first.
"""


class ConfigError(ValueError):
    """A setting is wrong: the message names the key, the value, the limit and the way out."""


class TrainingError(RuntimeError):
    """A run cannot start or go on: the message says what was found, what was kept and what to do."""


def first_line(error: Exception) -> str:
    """What a library's many-lined error says first."""
    return str(error).strip().partition("\n")[0]


def check(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_at_least(section: str, values: object, limits: dict[str, float]) -> None:
    """Raise `ConfigError` for the first attribute of `values` that lies below its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(values, name)
        check(value is None or value >= limit, f"{section}.{name} is {value}; it must be at least {limit}")
