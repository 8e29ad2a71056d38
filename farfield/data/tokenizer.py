"""Tokenizers: bytes, byte-level BPE trained here, or any fast one in Hugging Face's format.

All three are one class around a `PreTrainedTokenizerFast`, so that a model's folder carries its
tokenizer in a form that `transformers.AutoTokenizer` loads without farfield.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from farfield.data.messages import nearest, one_line

BYTES = 256
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
NAME_KEY = "farfield_name"
EXPECTED = "expected 'bytes', 'bpe:N', or a Hugging Face tokenizer's folder or name"

Encoded = tuple[np.ndarray, np.ndarray]
"""Ids, and for each the bytes of the text that end with it, both [n] int64."""


class Tokenizer:
    """Text to ids and back, by a fast Hugging Face tokenizer.

    Text is text: a special token's name that occurs in it ("<|eos|>") is encoded as its
    characters, never as the special token, and nothing is added before or after.
    """

    def __init__(self, hugging_face: Any, name: str) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = name
        self.hugging_face = hugging_face
        # A copy: settings for encoding a corpus must not leak into the tokenizer that is saved.
        self._definition: str = hugging_face.backend_tokenizer.to_str()
        self._backend = Backend.from_str(self._definition)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True

    def __repr__(self) -> str:
        return f"Tokenizer({self.name}: {self.vocab_size} ids)"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def bos_id(self) -> int | None:
        """The id of the token for a text's beginning, if there is one."""
        return self.hugging_face.bos_token_id

    @property
    def eos_id(self) -> int | None:
        """The id of the token for a text's end, if there is one."""
        return self.hugging_face.eos_token_id

    @property
    def pad_id(self) -> int | None:
        """The id that fills short rows, if there is one."""
        return self.hugging_face.pad_token_id

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the whole definition and of the library that carries it out."""
        import tokenizers

        version = "" if self.is_bytes else tokenizers.__version__
        return hashlib.sha256(f"{version}\0{self._definition}".encode()).hexdigest()

    @cached_property
    def is_bytes(self) -> bool:
        """Whether ids 0…255 are the bytes of UTF-8, so that text encodes as itself."""
        definition = json.loads(self._definition)
        model, before = definition["model"], definition["pre_tokenizer"] or {}
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        return (
            model["type"] == "BPE"
            and not model["merges"]
            and definition["normalizer"] is None
            and (before.get("type"), before.get("add_prefix_space")) == ("ByteLevel", False)
            # Text is never read as a special token; it would be as another added one.
            and all(token["special"] for token in definition["added_tokens"])
            and vocabulary == {character: byte for byte, character in enumerate(byte_characters())}
        )

    @cached_property
    def _token_bytes(self) -> np.ndarray | None:
        """Bytes of each id's token for byte-level BPE [vocab_size], else None."""
        definition = json.loads(self._definition)
        decoder = definition["decoder"] or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        if definition["model"]["type"] != "BPE" or kinds != {"ByteLevel"}:
            return None
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, index in self._backend.get_vocab(with_added_tokens=False).items():
            sizes[index] = len(token)  # one character of the byte alphabet for each byte
        return sizes

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        if self.is_bytes:
            return list(text.encode())
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by their names; bytes that are not UTF-8 become U+FFFD.

        Raises: ValueError for an id outside [0, vocab_size).
        """
        numbers = [int(index) for index in ids]
        for index in numbers:
            if not 0 <= index < self.vocab_size:
                raise ValueError(
                    f"tokenizer {self.name}: id {index}, expected 0 to {self.vocab_size - 1}"
                )
        text: str = self._backend.decode(numbers, skip_special_tokens=False)
        return text

    def encode_pieces(self, texts: Sequence[str]) -> list[Encoded]:
        """The ids of each text, and how many of its bytes end with each token.

        A token of byte-level BPE counts its own bytes. For other tokenizers the library's offsets
        count: a token takes what no token before it took, up to its own end (so white space that
        the tokenizer drops goes with the token after it, and of tokens that share a character the
        first takes it), and the last token takes the rest.
        """
        sizes = self._token_bytes
        if sizes is None:
            found = self._backend.encode_batch(list(texts), add_special_tokens=False)
            return [_by_offsets(one, text) for one, text in zip(found, texts, strict=True)]
        encoded = []
        fast = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        for one, text in zip(fast, texts, strict=True):
            ids = np.array(one.ids, np.int64)
            ends = np.cumsum(sizes[ids])
            if int(ends[-1] if len(ends) else 0) != len(text.encode()):
                # A space put in front, a normaliser: the tokens are not the text's own bytes.
                with_offsets = self._backend.encode(text, add_special_tokens=False)
                encoded.append(_by_offsets(with_offsets, text))
            else:
                encoded.append((ids, ends))
        return encoded

    def save(self, folder: Path) -> None:
        """Write the tokenizer in Hugging Face's format; `load_tokenizer(folder)` reads it back."""
        self.hugging_face.init_kwargs[NAME_KEY] = self.name
        self.hugging_face.save_pretrained(str(folder))


def _by_offsets(encoding: Any, text: str) -> Encoded:
    ids = np.array(encoding.ids, np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    if not len(ids):
        return ids, np.empty(0, np.int64)
    character_ends = np.array([end for _, end in encoding.offsets], np.int64)
    ends = bytes_before[np.maximum.accumulate(character_ends)]
    ends[-1] = bytes_before[-1]
    return ids, ends


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, by byte.

    Printable Latin-1 stands for itself; the other bytes take U+0100, U+0101, … in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def _wrapped(backend: Any, name: str) -> Tokenizer:
    """A tokenizer of ours: special tokens above all others, text never read as one of them."""
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = SPECIALS
    hugging_face = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    return Tokenizer(hugging_face, name)


def byte_tokenizer() -> Tokenizer:
    """Ids 0…255 are the bytes of UTF-8; 256, 257 and 258 are BOS, EOS and padding."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend, "bytes")


def bpe_size(spec: str) -> int | None:
    """N of "bpe:N", or None when the spec names another kind of tokenizer.

    Raises: ValueError when N is no number, or leaves no room for one merge beyond the 256 bytes and
    the three special tokens.
    """
    if not re.match(r"bpe($|[^a-z/])", spec, re.IGNORECASE) or Path(spec).expanduser().is_dir():
        return None
    match = re.fullmatch(r"bpe:(\d+)", spec)
    if match is None:
        raise ValueError(f"tokenizer {spec!r}: expected bpe:N, e.g. 'bpe:4096'")
    size, least = int(match[1]), BYTES + len(SPECIALS) + 1
    if size < least:
        raise ValueError(
            f"tokenizer {spec!r}: N is too small; expected at least {least} "
            f"({BYTES} bytes, {len(SPECIALS)} special tokens, one merge)"
        )
    return size


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Byte-level BPE of `size` ids in all, its merges learned from the texts as they come.

    Raises: ValueError when the texts don't hold enough repetition for so many merges.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIALS),
        min_frequency=2,
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    reached = backend.get_vocab_size() + len(SPECIALS)
    if reached != size:
        raise ValueError(
            f"tokenizer 'bpe:{size}': the training split yields {reached} ids; "
            f"expected more text, or 'bpe:{reached}' at most"
        )
    return _wrapped(backend, f"bpe:{size}")


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer a spec names: "bytes", a folder in Hugging Face's format, or a hub name.

    Raises: ValueError, in one line, for "bpe:N" (it has to be trained: `load_corpus` does), a
    misspelt name, a folder without a tokenizer, a name the hub doesn't know or can't be asked for,
    and a tokenizer without a fast form (only that one knows which text a token stands for).
    """
    name = str(spec)
    if name == "bytes":
        return byte_tokenizer()
    folder = Path(name).expanduser()
    if bpe_size(name) is not None:
        raise ValueError(
            f"tokenizer {name!r} is trained on a text: expected load_corpus(…, {name!r}), "
            "or the folder of one already trained"
        )
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~", "\\")) or name.count("/") > 1:
            raise ValueError(f"tokenizer {name!r}: no such folder; {EXPECTED}")
        misspelt = "/" not in name and nearest(name.lower(), ["bytes"])
        if misspelt:
            raise ValueError(f"unknown tokenizer {name!r}; {EXPECTED}{misspelt}")
    elif not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"tokenizer folder {name!r} holds no tokenizer.json; {EXPECTED}")
    return _from_hugging_face(str(folder) if folder.is_dir() else name, name)


def _from_hugging_face(where: str, name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(where)
    except Exception as error:  # the hub, its cache and each format's parser raise their own kinds
        raise ValueError(f"tokenizer {name!r} can't be loaded: {one_line(error)}") from error
    if not getattr(loaded, "is_fast", False):
        raise ValueError(
            f"tokenizer {name!r} is a {type(loaded).__name__} without a fast form; "
            "expected one with a tokenizer.json"
        )
    # A foreign folder is known by its own name: its path would travel with every model saved.
    known_as = Path(where).resolve().name if Path(where).is_dir() else name
    return Tokenizer(loaded, str(loaded.init_kwargs.get(NAME_KEY, known_as)))
