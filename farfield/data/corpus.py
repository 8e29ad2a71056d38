"""A corpus: a text source, split and tokenized, on disk, and never stale."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

from farfield.data.cache import Facts, default_cache_dir, entry
from farfield.data.encoding import encode_split, read_split, text_pieces
from farfield.data.sources import Source, find_source
from farfield.data.spool import Spool, cut, spool
from farfield.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe
from farfield.data.tokens import TokenStream

FORMAT = 1
"""Part of every fingerprint: raised when the same text would become other tokens or files."""

SPLIT_NAMES = ("train", "validation", "test")
BYTES_PER_TOKEN = 6
"""Text read for each token of `max_tokens`, where a token may be several bytes."""


@dataclass(frozen=True)
class Splits:
    """The fractions of a text for training, validation and test, in this order within the text.

    A fraction of 0 leaves that split empty: `Splits(0, 0, 1)` is a text to evaluate on alone.

    Raises: ValueError for a fraction outside [0, 1], or a sum other than 1.
    """

    train: float = 0.85
    validation: float = 0.05
    test: float = 0.10

    def __post_init__(self) -> None:
        parts = astuple(self)
        if not all(0 <= part <= 1 for part in parts) or not math.isclose(sum(parts), 1):
            raise ValueError(f"splits {parts}: expected fractions from 0 to 1 that add up to 1")


DEFAULT_SPLITS = Splits()


@dataclass(frozen=True)
class Corpus:
    """Three streams of tokens that share a text but never a byte of it.

    `policy` says, in JSON, how they came about: the source, what a document is and what stands
    between two, how the text was cut, how many documents, bytes and tokens each split has.
    """

    train: TokenStream
    validation: TokenStream
    test: TokenStream
    tokenizer: Tokenizer
    fingerprint: str
    policy: dict[str, Any]


def load_corpus(
    spec: str = "kjv",
    tokenizer: str = "bytes",
    *,
    cache_dir: Path | None = None,
    splits: Splits = DEFAULT_SPLITS,
    max_tokens: int | None = None,
    column: str = "text",
) -> Corpus:
    """Tokens of a text: `kjv`, a file, folder or glob, or `hub:NAME[:CONFIG[:SPLIT]]`.

    `tokenizer` is "bytes", "bpe:N" (trained on the training split alone), or a Hugging Face
    tokenizer's folder or name. `column` names the text of .jsonl, .parquet and hub rows.
    `max_tokens` keeps at most that many tokens in all, from the front of the text, shared out by
    `splits`; no more text is read than that takes (6 bytes a token where a token may be several).

    From 50 documents on a split is a set of whole documents, otherwise a stretch of the text, cut
    between characters; `policy["split"]` says which. Documents follow one another in the source's
    order without BOS or EOS, a newline added where one doesn't end with it.

    Tokens are kept in `cache_dir` (default `$FARFIELD_CACHE`, else the platform's cache folder)
    under a fingerprint of the text's content (for a dataset on the hub, of its revision: see
    `Hub.fingerprint`), the tokenizer, the splits and `max_tokens`. Every call reads the source to
    fingerprint it and checks the kept files' digests: changed input and damaged files are
    tokenized again, and several processes may do so at once.

    Raises: ValueError or OSError, in one line, for what can't be read, split or tokenized.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1, or None for all")
    source = find_source(spec, column)
    size = bpe_size(tokenizer)
    if size is not None and not splits.train:
        raise ValueError(f"tokenizer {tokenizer!r} is trained on the training split; expected one")
    ready = load_tokenizer(tokenizer) if size is None else None
    content = source.fingerprint()
    fingerprint = _fingerprint(
        [FORMAT, content, _bpe_identity(tokenizer) if ready is None else ready.fingerprint],
        [astuple(splits), max_tokens],
    )

    def build(folder: Path) -> Facts:
        spooled = _read(source, folder / "spool", content, _byte_limit(ready, max_tokens))
        facts = _tokenize(spooled, folder, ready, size, splits, max_tokens)
        shutil.rmtree(folder / "spool")
        return facts

    folder, facts = entry((cache_dir or default_cache_dir()) / "tokens", fingerprint, build)
    found = load_tokenizer(folder / "tokenizer") if ready is None else ready
    train, validation, test = (read_split(folder, name, found.vocab_size) for name in SPLIT_NAMES)
    policy = {
        "source": spec,
        **source.describe(),
        "documents": "concatenated",
        "bos": False,
        "between_documents": "a newline where a document doesn't end with one",
        "tokenizer": found.name,
        "fractions": dict(zip(SPLIT_NAMES, astuple(splits), strict=True)),
        "max_tokens": max_tokens,
        **facts,
    }
    return Corpus(train, validation, test, found, fingerprint, policy)


def _fingerprint(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _bpe_identity(spec: str) -> str:
    import tokenizers

    return f"{spec} by tokenizers {tokenizers.__version__}"


def _byte_limit(ready: Tokenizer | None, max_tokens: int | None) -> int | None:
    if max_tokens is None:
        return None
    return max_tokens * (1 if ready is not None and ready.is_bytes else BYTES_PER_TOKEN)


def _read(source: Source, folder: Path, content: str, limit: int | None) -> Spool:
    """The source's text, spooled in `folder`.

    Raises: ValueError for an empty source, and for one that changed since `content` was its
    fingerprint: its tokens would be kept under the name of another text.
    """
    folder.mkdir()
    pieces = source.pieces()
    with closing(cast(Any, pieces)):
        spooled = spool(pieces, folder, limit)
    if not len(spooled):
        raise ValueError(f"{source.spec}: the text is empty; expected at least one character")
    if source.fingerprint() != content:
        raise ValueError(f"{source.spec}: the text changed while it was read; run it again")
    return spooled


def _tokenize(
    spooled: Spool,
    folder: Path,
    ready: Tokenizer | None,
    size: int | None,
    splits: Splits,
    max_tokens: int | None,
) -> Facts:
    """Write the three splits (and a tokenizer trained here) to `folder`; returns what was done.

    Raises: ValueError when a split that was asked for gets no token.
    """
    parts: tuple[float, float, float] = astuple(splits)
    edges, by = cut(spooled, parts)
    tokenizer = ready
    if tokenizer is None:
        assert size is not None
        texts = (text for _, text in text_pieces(spooled, edges[0], edges[1]))
        tokenizer = train_bpe(texts, size)
        tokenizer.save(folder / "tokenizer")
    facts: Facts = {
        "split": by,
        "document_count": len(spooled.starts),
        "empty_documents": spooled.empty,
        "splits": {},
    }
    for i, name in enumerate(SPLIT_NAMES):
        # For bytes the text itself was limited; its splits add up to max_tokens.
        share = None if max_tokens is None or tokenizer.is_bytes else int(max_tokens * parts[i])
        encode_split(spooled, edges[i], edges[i + 1], tokenizer, folder, name, share)
        stream = read_split(folder, name, tokenizer.vocab_size)
        if parts[i] and not len(stream):
            raise ValueError(
                f"the {name} split ({edges[i + 1] - edges[i]} bytes of text) has no token; "
                "expected a longer text, or a larger max_tokens"
            )
        facts["splits"][name] = {
            "text": [edges[i], edges[i + 1]],
            "bytes": stream.byte_count(0, len(stream)),
            "tokens": len(stream),
            "documents": stream.document_count,
        }
    return facts
