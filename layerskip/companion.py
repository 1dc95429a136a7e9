"""Files that live beside a checkpoint's weights and are named in its config, under our key."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from layerskip.settings import carried


def find_companion(config: PreTrainedConfig, key: str, file: str, way_out: str) -> Path | None:
    """The file that a checkpoint (folder or Hub repository) names by `key` in its config, None where it names none.

    Args:
        way_out: what to do where the file is lost, for the message.

    Raises:
        FileNotFoundError: if it is not beside the checkpoint's weights.
    """
    if not carried(config).get(key):
        return None
    source, commit = config._name_or_path, getattr(config, "_commit_hash", None)
    path = cached_file(source, file, revision=commit, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise FileNotFoundError(
            f"{source or 'this model'}: its config names {key.replace('_', ' ')}, but there is no {file} beside its "
            f"weights: {way_out}"
        )
    return Path(path)
