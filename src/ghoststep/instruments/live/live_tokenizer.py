"""The setup's own tokenizer, read as the files it would save: the same instruments then look at it as at a checkpoint's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghoststep.errors import CannotLook, DoesNotApply
from ghoststep.evidence.base import Evidence, Missing
from ghoststep.evidence.tokenizer import TemplateTokens
from ghoststep.instruments.chat_template import measure_template, need_templates
from ghoststep.instruments.tokenizers.base import Tokenizer
from ghoststep.instruments.tokenizers.locate import locate
from ghoststep.registry import instrument
from ghoststep.subjects.checkpoint import Checkpoint
from ghoststep.subjects.setup import Setup


class MemorySource:
    """Files held in memory as a `Source`."""

    is_remote = False

    def __init__(self, name: str, contents: Mapping[str, bytes]) -> None:
        self.name, self._contents = name, dict(contents)

    def files(self) -> tuple[str, ...]:
        """All file names, sorted."""
        return tuple(sorted(self._contents))

    def size(self, file: str) -> int:
        """Size in bytes."""
        return len(self._contents[file])

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Exactly bytes [start, stop); `CannotLook` beyond the end."""
        if stop > self.size(file):
            raise CannotLook(f"{file} has {self.size(file)} bytes, {stop} were asked for")
        return self._contents[file][start:stop]

    def read_whole(self, file: str, *, limit_bytes: int) -> bytes:
        """The whole file; `CannotLook` when it is larger than `limit_bytes`."""
        if self.size(file) > limit_bytes:
            raise CannotLook(f"{file} has {self.size(file)} bytes, at most {limit_bytes} are read")
        return self._contents[file]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupTokenizer(Evidence):
    """The setup's tokenizer as the files it saves, held in memory."""

    files: Checkpoint


@instrument
def setup_tokenizer(setup: Setup) -> SetupTokenizer:
    """Let the tokenizer save itself into a temporary folder and read the files back; nothing is run that they name.

    `DoesNotApply` without a tokenizer, `CannotLook` for an object that cannot save itself. Cost: about half a second for 150,000
    tokens.
    """
    given = setup.tokenizer
    if given is None:
        raise DoesNotApply("the setup has no tokenizer")
    if not hasattr(given, "save_pretrained") and hasattr(given, "tokenizer"):
        given = given.tokenizer
    source = MemorySource("the setup's tokenizer", _contents(given))
    if not source.files():
        raise CannotLook("the setup's tokenizer saved no file")
    return SetupTokenizer(files=Checkpoint(source, name=source.name, selection=None))


def _contents(given: Any) -> dict[str, bytes]:
    if type(given).__module__.partition(".")[0] == "tokenizers":
        return {"tokenizer.json": str(given.to_str()).encode()}
    if not hasattr(given, "save_pretrained"):
        raise CannotLook(f"the setup's tokenizer is a {type(given).__name__}; expected one with save_pretrained")
    with tempfile.TemporaryDirectory(prefix="ghoststep_") as folder:
        try:
            given.save_pretrained(folder)
        except Exception as error:
            raise CannotLook(f"the tokenizer cannot be saved ({type(error).__name__}: {str(error)[:200]})") from error
        root = Path(folder)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@instrument
def live_loaded_tokenizer(saved: SetupTokenizer) -> Tokenizer:
    """The tokenizer behind the other facts; see `ghoststep.instruments.tokenizer`."""
    return locate(saved.files)


@instrument
def live_template_tokens(saved: SetupTokenizer, tokenizer: Tokenizer | Missing) -> TemplateTokens:
    """Ids that the setup's chat template writes around messages."""
    if isinstance(tokenizer, Missing):
        need_templates(saved.files)
        raise CannotLook(f"there is a chat template, but no tokenizer to encode it: {tokenizer.reason}")
    return measure_template(saved.files, tokenizer)
