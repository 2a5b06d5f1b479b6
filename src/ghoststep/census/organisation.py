"""`hf:org/*`: which models an organisation has, asked from the Hub's HTTP API with the client that reads checkpoints.

`huggingface_hub.HfApi.list_models` asks the same address, without a limit on the answer and after a further request of its own.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from urllib.parse import quote, urljoin

from ghoststep.errors import GhoststepError, UsageError
from ghoststep.text import visible

MAX_MODELS = 1_000
_MAX_PAGES = 20
_ORGANISATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}")
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')


def models_of(text: str, *, offline: bool) -> tuple[str, ...]:
    """`org/*` or `org/name-*` → the names of its models, sorted. Wildcards stand in the model's name only.

    `UsageError` when that cannot be asked or answered, for more than 1,000 models, or none of such a name. Cost: a request for
    every 1,000 models.
    """
    organisation, _, pattern = text.partition("/")
    if not pattern or "/" in pattern or "@" in pattern or not _ORGANISATION.fullmatch(organisation):
        raise UsageError(f"hf:{visible(text)}: expected hf:org/*, with wildcards in the model's name only and no revision")
    try:
        listed = _listed(organisation, offline)
    except UsageError:
        raise
    except GhoststepError as error:
        raise UsageError(f"hf:{text}: the Hub did not list its models: {error}") from error
    start = f"{organisation}/"
    chosen = sorted(name for name in listed if name.startswith(start) and fnmatchcase(name[len(start) :], pattern))
    if not chosen:
        raise UsageError(f"hf:{text}: none of its {len(listed)} models has such a name; check the spelling, or log in")
    return tuple(chosen)


def _listed(organisation: str, offline: bool) -> set[str]:
    from ghoststep.subjects import hub
    from ghoststep.subjects.http_connection import HttpLimits, Origin
    from ghoststep.subjects.http_ranges import RangeClient

    if offline or hub.offline_by_environment():
        raise UsageError(f"hf:{organisation}/*: offline, the Hub cannot be asked: name the models, or give --list FILE")
    endpoint, limits = hub.hub_endpoint(), HttpLimits()
    client = RangeClient(endpoint, token=hub.hub_token(), user_agent=hub.hub_user_agent(), limits=limits)
    names: set[str] = set()
    url = f"{endpoint}/api/models?author={quote(organisation)}&limit={MAX_MODELS}"
    try:
        for _ in range(_MAX_PAGES):
            page = client.page(url, limit_bytes=limits.max_listing_bytes)
            names |= _names(page.body, organisation)
            following = _NEXT.search(page.link)
            if len(names) > MAX_MODELS:
                break
            if following is None:
                return names
            url = urljoin(url, following[1])
            if Origin.of(url) != Origin.of(endpoint):
                raise UsageError(f"hf:{organisation}/*: the next page of the list lies on another host: refused")
    finally:
        client.close()
    raise UsageError(
        f"hf:{organisation}/*: more than {MAX_MODELS} models or {_MAX_PAGES} pages; write the wanted ones into a file and "
        "give --list FILE"
    )


def _names(body: bytes, organisation: str) -> set[str]:
    try:
        entries = json.loads(body)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise UsageError(f"hf:{organisation}/*: the Hub's answer is no list of models")
    return {e["id"] for e in entries if isinstance(e, dict) and isinstance(e.get("id"), str)}
