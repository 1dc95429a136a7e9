"""The error a user can cause. Printed as one line; anything else is a bug and keeps its traceback."""


class InputError(ValueError):
    """Something given cannot be used: the message names the value, the limit and the way out."""


def first_line(error: BaseException) -> str:
    """What a library's many-lined error says first; the kind of error if it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
