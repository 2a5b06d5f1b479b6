"""Special tokens as the JSON files beside a tokenizer name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSpecials:
    """`strings` maps role to token string, `extra` are further special strings, `added` are added tokens of the config.

    `add_bos` is the flag `add_bos_token` of the config, None when neither it nor `add_eos_token` is there.
    """

    strings: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    added: tuple[tuple[int, str, bool], ...] = ()
    add_bos: bool | None = None


def read_specials(config: Mapping[str, object] | None, specials: Mapping[str, object] | None) -> NamedSpecials:
    """Merge `tokenizer_config.json` with `special_tokens_map.json`; where both name a role, the config counts."""
    merged = {**(specials or {}), **{k: v for k, v in (config or {}).items() if v is not None}}
    strings = {role: text for role in ROLES if (text := token_string(merged.get(f"{role}_token"))) is not None}
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = merged.get(key)
        values = listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ()
        extra += [text for value in values if (text := token_string(value)) is not None]
    flags = [k for k in ("add_bos_token", "add_eos_token") if k in merged]
    return NamedSpecials(
        strings=strings,
        extra=tuple(extra),
        added=_added_decoder(merged.get("added_tokens_decoder")),
        add_bos=(merged.get("add_bos_token") is True) if flags else None,
    )


def token_string(value: object) -> str | None:
    """A token given as a plain string or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _added_decoder(value: object) -> tuple[tuple[int, str, bool], ...]:
    if not isinstance(value, Mapping):
        return ()
    found = []
    for key, entry in value.items():
        text = token_string(entry)
        if text is not None and str(key).isascii() and str(key).isdigit():
            found.append((int(key), text, isinstance(entry, Mapping) and entry.get("special") is True))
    return tuple(sorted(found))
