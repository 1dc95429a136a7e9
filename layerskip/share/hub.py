"""The upload of a run with its model card. Imports neither torch nor transformers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from layerskip.share.card import write_model_card
from layerskip.share.run_record import HubError
from layerskip.share.shared_files import check_checkpoint, shared_files, stage

__all__ = ["HubError", "UnreachableError", "check_repo_id", "check_revision", "upload"]


class UnreachableError(HubError):
    """The Hub did not answer, or broke off: the same upload may well succeed later."""


def upload(
    run_dir: Path,
    repo_id: str,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    exclude: Sequence[str] = (),
) -> str:
    """Write the model card and upload the run. Interrupted, the same call sends only what is still missing.

    Args:
        repo_id: owner/name; made if it is not there.
        private: of a repository that is made; None is the owner's default.
        revision: branch; made if it is not there. None is the main branch.
        token: None is the one that `hf auth login` or HF_TOKEN left.
        license: for the card, as the Hub names it, e.g. apache-2.0; None: the base model's, where it is known.
        base_model: for the card, a Hub id; None: what the run's settings say.
        exclude: patterns of names that are not uploaded.

    Returns:
        The address of what was uploaded.

    Raises:
        HubError: if the folder, the name, the token or the network will not do.
    """
    check_repo_id(repo_id)
    check_checkpoint(run_dir)
    if revision is not None:
        check_revision(revision)
    token = token or get_token()
    if token is None:
        raise HubError("no Hugging Face token: run `hf auth login`, or set HF_TOKEN to one that may write")
    write_model_card(run_dir, repo_id, license, base_model)
    files = shared_files(run_dir, exclude)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="layerskip-") as folder:
        stage(files, Path(folder))
        try:
            _send(api, Path(folder), repo_id, private, revision)
        except HubError:
            raise
        except (HTTPError, OSError, RuntimeError, ValueError) as error:  # ValueError: metadata or an LFS answer
            raise _explain(api, repo_id, error) from error
    return f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")


def _send(api: HfApi, folder: Path, repo_id: str, private: bool | None, revision: str | None) -> None:
    """`upload_folder` and not `create_commit` or `upload_large_folder`, because of what happens when it breaks off.

    With hf_xet (which transformers brings) chunks are retried and, sent again, cost nothing as the store has them;
    without, LFS objects are: every request is tried six times, and a second call is told which objects are there
    already. Either way files come into the repository by a commit at the end: it never holds half a model.
    `upload_large_folder` keeps its state in the run's own folder, commits piece by piece, and is gone from newer
    releases, whose `upload_folder` does its work.
    """
    if (folder / "README.md").is_file():
        _check_card((folder / "README.md").read_text(encoding="utf-8"))
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise HubError(
            f"{repo_id} is there already, and public: make it private in its settings, or leave --private out"
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message="Upload a LayerSkip run")


def _check_card(text: str) -> None:
    """Ask the Hub whether it takes a card's metadata, before gigabytes are sent."""
    try:
        ModelCard(text, ignore_metadata_errors=True).validate()
    except ValueError as error:
        try:
            reason = json.loads(str(error))["errors"][0]["message"]
        except (ValueError, LookupError, TypeError):
            reason = _first_line(error)
        raise HubError(f"the Hub does not take the card's metadata ({reason}): mend README.md, or --license") from error


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


def check_revision(revision: str) -> None:
    """Raise HubError unless a branch can have this name: git's rules, and none of the Hub's own refs."""
    parts = revision.split("/")
    bad = any(not part or part.startswith(".") or part.endswith((".", ".lock")) for part in parts)
    bad = bad or any(sign in revision for sign in (*" ~^:?*[\\", "..", "@{")) or not revision.isprintable()
    if bad or revision.startswith(("-", "refs/")):
        raise HubError(f"{revision!r} cannot name a branch: write letters, digits, '-', '_', '.', such as trial-2")


def _explain(api: HfApi, repo_id: str, error: BaseException) -> HubError:
    """The error in one line: what the Hub or the network said, wherever in the chain of causes it stands."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    refused = next((each for each in chain if isinstance(each, HfHubHTTPError)), None)
    if refused is not None:
        return _refusal(repo_id, refused)
    if any(isinstance(each, OfflineModeIsEnabled) for each in chain):
        return HubError(f"cannot reach {api.endpoint}: HF_HUB_OFFLINE is set; unset it")
    if any(isinstance(each, HTTPError | ConnectionError | TimeoutError) for each in chain):
        reason = _first_line(chain[-1])
        return UnreachableError(f"cannot reach {api.endpoint} ({reason}): check the network; the same call goes on")
    return HubError(f"{repo_id} was not uploaded ({_first_line(error)}); the same call goes on where it broke off")


def _refusal(repo_id: str, error: HfHubHTTPError) -> HubError:
    status = error.response.status_code if error.response is not None else 0
    reason = (error.server_message or "").strip().partition("\n")[0].rstrip(".")
    said = f" ({status}{': ' if reason else ''}{reason})"
    if status == 401:
        return HubError(f"the Hub does not accept the token{said}: run `hf auth login`, or set HF_TOKEN anew")
    if status == 403:
        owner = repo_id.partition("/")[0]
        return HubError(
            f"the token may not write to {repo_id}{said}: use one with write access to {owner}, or another owner/name"
        )
    if status == 404:
        return HubError(f"the Hub does not find {repo_id}{said}: check owner and name, and what the token may see")
    if status >= 500 or status in (408, 429):
        return UnreachableError(f"the Hub could not take {repo_id} now{said}: the same call, later, goes on")
    return HubError(f"the Hub refused {repo_id} ({status}: {reason or _first_line(error)})")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
