"""Index files of sharded checkpoints (`model.safetensors.index.json`, `pytorch_model.bin.index.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ghoststep.errors import CannotLook, UnsafeInput
from ghoststep.subjects.base import Source
from ghoststep.subjects.containers.base import Container, brief
from ghoststep.subjects.local import check_relative_name

_INDEX_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The index: which file holds which tensor, and the files in name order."""

    file: str
    weight_map: Mapping[str, str]
    shards: tuple[str, ...]


def read_index(source: Source, file: str) -> ShardIndex:
    """Parse an index and see that every shard it names is there.

    `UnsafeInput` for a shard name that leaves the folder, `CannotLook` for missing shards (named) or no index.
    """
    place = f"{source.name}: {file}"
    try:
        parsed = json.loads(source.read_whole(file, limit_bytes=_INDEX_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        why = "nests too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CannotLook(f"{place} is not valid JSON ({why}). Download or save it again.") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CannotLook(f"{place} has no weight_map from tensor names to files, expected one. Save the checkpoint again.")
    folder = file.rpartition("/")[0]
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise UnsafeInput(f"{place}: tensor {name[:80]!r} maps to {brief(shard)}, expected a file name.")
    named = {shard: check_relative_name(shard, where=place) for shard in sorted(set(weight_map.values()))}
    located = {shard: f"{folder}/{shard}" if folder else shard for shard in named}
    there = set(source.files())
    missing = [shard for shard in named if located[shard] not in there]
    if missing:
        raise CannotLook(
            f"{place} names {len(named)} shards, {len(missing)} of them missing: {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}. Download or copy them into the folder."
        )
    return ShardIndex(
        file=file, weight_map={name: located[shard] for name, shard in weight_map.items()}, shards=tuple(located.values())
    )


def check_against_index(source: Source, index: ShardIndex, container: Container) -> None:
    """`CannotLook` when a tensor is not in the shard that the index says."""
    wrong = [
        name
        for name, shard in index.weight_map.items()
        if name not in container.tensors or container.tensors[name].file != shard
    ]
    if wrong:
        name = wrong[0]
        raise CannotLook(
            f"{source.name}: {index.file} says that {index.weight_map[name]} holds {name[:80]!r}, but it does not "
            f"({len(wrong)} such tensors). Index and shards belong to different saves: download or save all of them again."
        )
