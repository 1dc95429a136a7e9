"""Files that live beside a checkpoint's weights, and that its config names, under our key."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from layerskip.checkpoint.settings import KEY, carried


def find_companion(config: PreTrainedConfig, key: str, file: str, way_out: str) -> Path | None:
    """The file that a checkpoint (folder or Hub repository) names by `key` in its config, None where it names none.

    Args:
        way_out: what to do where the file is lost, for the message.

    Raises:
        FileNotFoundError: if it is not beside the checkpoint's weights.
    """
    if not carried(config).get(key):
        return None
    source = config._name_or_path
    path = cached_file(source, file, revision=_commit(config), _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise FileNotFoundError(
            f"{source or 'this model'}: its config names {key.replace('_', ' ')}, but there is no {file} beside its "
            f"weights: {way_out}"
        )
    return Path(path)


def _commit(config: PreTrainedConfig) -> str | None:
    """The commit that a config was downloaded at, None for the main branch's or a folder's.

    transformers 5.24 does not note it any more. But it lies in the cache: it is the newest commit whose config.json
    carries what this one does, the measured losses of the exits among it.
    """
    noted: str | None = getattr(config, "_commit_hash", None)
    source = config._name_or_path
    if noted or not source or Path(source).is_dir():
        return noted
    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source, repo_type="model") / "snapshots"
    found = [path for path in cache.glob("*/config.json") if _carries(path) == carried(config)]
    return max(found, key=lambda path: path.lstat().st_mtime).parent.name if found else None


def _carries(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get(KEY)
    except (OSError, ValueError):
        return None
