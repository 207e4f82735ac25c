"""Models on the Hugging Face hub. Every failure is one line with the next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compress.checkpoint import read_config
from compress.errors import UserError

_FORM = re.compile(r"([A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)(?:@([\w.\-/]+))?")
WANTED = (
    "model*.safetensors",
    "*.json",
    "*.jinja",
    "*.py",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
UNWANTED = ("original/*", "onnx/*", "consolidated*", "*/*.safetensors")


def parse(model: str) -> tuple[str, str | None] | None:
    """(org/name, revision) if `model` has the form of a hub id, else None."""
    match = _FORM.fullmatch(model)
    return (match.group(1), match.group(2)) if match else None


def download(repository: str, revision: str | None) -> Path:
    """The local snapshot of a model: safetensors, config, tokenizer, code and licence, nothing else.

    Raises UserError for a missing or gated repository, an unknown revision, or no network.
    """
    return _snapshot(repository, revision, WANTED)


def download_config(repository: str, revision: str | None) -> dict[str, Any]:
    """Only config.json. Raises UserError as `download` does."""
    return read_config(_snapshot(repository, revision, ("config.json",)))


def _snapshot(repository: str, revision: str | None, wanted: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        # Also for a single file: hf_hub_download retries for 20 seconds before it says that there is no network.
        return snapshot_download(
            repository, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(UNWANTED)
        )

    return Path(_explained(repository, revision, fetch))


def _explained(repository: str, revision: str | None, action: Callable[[], str]) -> str:
    from huggingface_hub import errors

    page = f"huggingface.co/{repository}"
    try:
        return action()
    except errors.GatedRepoError:
        why = f"gated; accept its licence at {page} and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        why = f"has no revision {revision!r}; see {page}/tree/main"
    except errors.RepositoryNotFoundError:
        why = "not found on the hub, or private; check the spelling, or set HF_TOKEN to a token that may read it"
    except errors.LocalEntryNotFoundError:
        why = "not in the local hub cache, and the hub cannot be reached; connect, or give a local directory"
    except errors.HfHubHTTPError as error:
        why = _status(error.response.status_code, page)
    except (errors.OfflineModeIsEnabled, OSError) as error:
        why = f"the hub cannot be reached ({type(error).__name__}); connect, or give a local directory"
    raise UserError(f"{repository}: {why}")


def _status(code: int, page: str) -> str:
    if code in (401, 403):
        return f"the hub refused access ({code}); set HF_TOKEN to a token that may read {page}"
    return f"the hub answered {code}; try again later, or give a local directory"
