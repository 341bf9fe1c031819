"""How is the content uploaded, completely or not at all?  In one commit after all files.

Files are not visible before the commit; a second call sends only the missing ones.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from posttrain.runtime import HTTP_ERROR
from posttrain.serving.publish.content import Content
from posttrain.types import UserError, one_line

WEIGHTS = re.compile(r"[^/]*\.(?:safetensors|bin|pt|pth|gguf)|[^/]*\.(?:safetensors|bin)\.index\.json")
AGAIN = "The repository has not changed. The same command sends what is missing."


def upload(content: Content, repo: str, *, public: bool) -> str:
    """Publish the content in one commit and return where; UserError if the Hub refuses it."""
    if not get_token():
        raise UserError(
            "There is no Hub token on this machine. Create a token with write access at "
            f"{constants.ENDPOINT}/settings/tokens, then `hf auth login`, or set the environment variable HF_TOKEN."
        )
    api = HfApi()
    with _hub_errors(repo):
        api.create_repo(repo, private=not public, exist_ok=True)
        info = api.model_info(repo)
        if not public and info.private is False:
            raise UserError(
                f"{repo} exists and is public. Choose another name, make it private in its settings, or write --public."
            )
        # otherwise old weights could be loaded instead of these
        names = {sibling.rfilename for sibling in info.siblings or []}
        stale = sorted(name for name in names - set(content.files) if WEIGHTS.fullmatch(name))
        operations = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, what) for name, what in content.files.items()]
        for name in stale:
            print(f"Removed from {repo}, where it stays in the history: {name}")
        done = api.create_commit(repo, operations, commit_message="Model, card and results", parent_commit=info.sha)
    return f"Published as {repo}, {'private' if info.private else 'public'}: {done.commit_url}"


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        reason = {
            401: "The Hub does not know this token: log in again (`hf auth login`).",
            403: f"The token may not write to {repo}: use one with write access, or a name of your own.",
            404: f"There is no {repo} that this token may see.",
            409: f"{repo} has changed during the upload: try again.",
            412: f"{repo} has changed during the upload: try again.",
        }.get(status, f"The Hub refused: {one_line(error)}.")
        raise UserError(f"{reason} {AGAIN}") from error
    except ValueError as error:
        raise UserError(f"The Hub refused: {one_line(error)}. {AGAIN}") from error
    except (HTTP_ERROR, OSError, RuntimeError) as error:  # the errors of a lost connection
        cause = error.__cause__ or error
        raise UserError(f"The upload to {repo} was cut off ({one_line(cause)}). {AGAIN}") from error
