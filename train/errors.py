"""The two errors a user can cause, printed as one line; anything else is a bug and keeps its traceback.

With them, the checks of settings that raise the first.
"""

from pathlib import Path


class ConfigError(ValueError):
    """A setting is wrong: the message names the key, the value, the limit and the way out."""


class TrainingError(RuntimeError):
    """A run cannot start or go on: the message says what was found, what was kept and what to do."""


class LocalError(TrainingError):
    """A `TrainingError` that only this process knows of: the others cannot say it."""


def first_line(error: Exception) -> str:
    """What a library's many-lined error says first."""
    return str(error).strip().partition("\n")[0]


def cannot_load(what: str, name: str, error: Exception) -> str:
    """The message for a local folder or Hub id that cannot be loaded: `what` is the setting, or the thing.

    A library that was given a path which is not there takes it for a repository's name, and says odd things of it.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return f"cannot load {what} {name!r}: {first_line(error)}"
    if folder.is_absolute() or name.startswith(("~", "./", "../")) or name.count("/") > 1:
        return f"cannot load {what} {name!r}: there is no such folder"
    return f"cannot load {what} {name!r}: there is no such folder, and as a Hub id: {first_line(error)}"


def check(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_at_least(section: str, values: object, limits: dict[str, float]) -> None:
    """Raise `ConfigError` for the first attribute of `values` that lies below its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(values, name)
        check(value is None or value >= limit, f"{section}.{name} is {value}; it must be at least {limit}")


def check_at_most(section: str, values: object, limits: dict[str, float]) -> None:
    """Raise `ConfigError` for the first attribute of `values` that lies above its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(values, name)
        check(value is None or value <= limit, f"{section}.{name} is {value}; it must be at most {limit}")


def check_above_zero(section: str, values: object, *names: str) -> None:
    """Raise `ConfigError` for the first of the attributes that is not above 0 and finite."""
    for name in names:
        value = getattr(values, name)
        check(0 < value < float("inf"), f"{section}.{name} is {value}; it must be above 0 and finite")
