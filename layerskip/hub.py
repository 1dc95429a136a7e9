"""The upload of a run with its model card. Imports neither torch nor transformers."""

from __future__ import annotations

import glob
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from layerskip.card import HubError, read_json, write_model_card

# Named in config.json by these keys. layerskip.adapters and layerskip.vocabulary have the names too, and torch.
_COMPANIONS = {"adapters": "exit_adapters.safetensors", "draft_vocabulary": "draft_vocabulary.safetensors"}
# What is uploaded. All else stays: checkpoints and optimizer states, packed data, logs, and what names local
# paths (config.yaml, provenance.json).
_UPLOADED = (
    *("README.md", "LICENSE*", "config.json", "generation_config.json", "model*.safetensors", "*.index.json"),
    *_COMPANIONS.values(),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template*", "evaluation.json", "benchmark.json", "metrics.jsonl", "prompts/*.jsonl"),
)


def upload_files(run_dir: Path) -> list[Path]:
    """The files of a run that `upload` sends, the model card among them only if it is there already.

    Raises:
        HubError: if the folder holds no finished checkpoint.
    """
    _check_checkpoint(run_dir)
    return sorted({path for pattern in _UPLOADED for path in run_dir.glob(pattern) if path.is_file()})


def upload(
    run_dir: Path,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    license: str | None = None,
) -> str:
    """Write the model card and upload the run in one commit.

    Args:
        repo_id: owner/name; made if it is not there.
        private: of a repository that is made; None is the owner's default.
        revision: branch; made if it is not there. None is the main branch.
        token: None is the one that `hf auth login` or HF_TOKEN left.
        license: for the card, as the Hub names it, e.g. apache-2.0.

    Returns:
        The address of what was uploaded.

    Raises:
        HubError: if the folder, the name, the token or the network will not do.
    """
    check_repo_id(repo_id)
    _check_checkpoint(run_dir)
    token = token or get_token()
    if token is None:
        raise HubError("no Hugging Face token: run `hf auth login`, or set HF_TOKEN to one that may write")
    write_model_card(run_dir, repo_id, license)
    api = HfApi(token=token)
    try:
        _send(api, run_dir, repo_id, private, revision)
    except HfHubHTTPError as error:
        raise HubError(_refusal(repo_id, error)) from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise HubError(f"cannot reach {api.endpoint} ({reason}): check the network and HF_HUB_OFFLINE") from error
    return f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")


def _send(api: HfApi, run_dir: Path, repo_id: str, private: bool | None, revision: str | None) -> None:
    names = [path.relative_to(run_dir).as_posix() for path in upload_files(run_dir)]
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    api.upload_folder(
        repo_id=repo_id,
        folder_path=run_dir,
        revision=revision,
        allow_patterns=[glob.escape(name) for name in names],
        commit_message="Upload a LayerSkip run",
    )


def check_repo_id(repo_id: str) -> None:
    """Raise HubError unless `repo_id` can name a repository of someone's."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        valid = False
    else:
        valid = repo_id.count("/") == 1
    if not valid:
        raise HubError(f"{repo_id!r} names no repository: write owner/name, of letters, digits, '-', '_' and '.'")


def _check_checkpoint(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise HubError(f"{run_dir} is no folder: give the folder of a finished run")
    if not (run_dir / "config.json").is_file():
        raise HubError(f"{run_dir} holds no config.json: give the folder of a finished run")
    index = read_json(run_dir / "model.safetensors.index.json")
    shards = set(index.get("weight_map", {}).values()) or {"model.safetensors"}
    carried = read_json(run_dir / "config.json").get("layerskip") or {}
    shards.update(file for key, file in _COMPANIONS.items() if carried.get(key))
    missing = sorted(shard for shard in shards if not (run_dir / shard).is_file())
    if missing:
        raise HubError(f"{run_dir} holds no {missing[0]}: only a whole checkpoint in safetensors is uploaded")


def _refusal(repo_id: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code if error.response is not None else None
    if status in (401, 403):
        return f"the token may not write to {repo_id}: use one with write access, or another owner/name"
    reason = (error.server_message or str(error)).strip().partition("\n")[0]
    return f"the Hub refused {repo_id} ({status}: {reason})"
