"""Models on the Hugging Face hub. Every failure is one line with the next step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    from huggingface_hub import snapshot_download

    return Path(
        _explained(
            repository,
            revision,
            lambda: snapshot_download(
                repository, revision=revision, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
            ),
        )
    )


def download_config(repository: str, revision: str | None) -> dict[str, Any]:
    """Only config.json. Raises UserError as `download` does."""
    from huggingface_hub import hf_hub_download

    path = _explained(repository, revision, lambda: hf_hub_download(repository, "config.json", revision=revision))
    return json.loads(Path(path).read_bytes())


def _explained(repository: str, revision: str | None, action: Callable[[], str]) -> str:
    import httpx
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
    except errors.EntryNotFoundError:
        why = f"has no config.json, so is not a transformers model; see {page}/tree/main"
    except errors.HfHubHTTPError as error:
        why = _status(error.response.status_code, page)
    except (errors.OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        why = f"the hub cannot be reached ({type(error).__name__}); connect, or give a local directory"
    raise UserError(f"{repository}: {why}")


def _status(code: int, page: str) -> str:
    if code in (401, 403):
        return f"the hub refused access ({code}); set HF_TOKEN to a token that may read {page}"
    return f"the hub answered {code}; try again later, or give a local directory"
