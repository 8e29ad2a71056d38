"""Tokenizers round-trip, count bytes exactly, and survive a folder that others can load."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from farfield.data import Tokenizer, load_tokenizer
from farfield.data.tokenizer import bpe_size, byte_characters, byte_tokenizer, train_bpe

AWKWARD = [
    "",
    " ",
    "  two  spaces , and . don't \n\n\n tail \n",
    "<|bos|>text<|eos|><|pad|>",
    "\x00\x7f\r\n\t\u2028\ufeff",
    "naïve 三つ 🙂👩‍👩‍👧 e\u0301",
]
TRAINING = ["the cat sat on the mat. naïve 三つ 三つ 🙂🙂 don't don't\n" * 20]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """The byte tokenizer."""
    return byte_tokenizer()


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """A small BPE."""
    return train_bpe(TRAINING, 290)


def wrapped(backend: Backend, folder: Path, **options: object) -> Tokenizer:
    """A foreign tokenizer, by way of a folder."""
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(str(folder))
    return load_tokenizer(folder)


def words(vocabulary: str) -> dict[str, int]:
    """Ids for white-space separated tokens."""
    return {token: i for i, token in enumerate(vocabulary.split())}


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Lower-casing, dropping spaces: what BERT does."""
    backend = Backend(models.WordPiece(words("[UNK] the cat ##s sat é ."), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return wrapped(backend, tmp_path_factory.mktemp("wordpiece"), unk_token="[UNK]")


def test_alphabet_is_the_librarys() -> None:
    assert len(set(byte_characters())) == 256
    assert sorted(byte_characters()) == sorted(ByteLevel.alphabet())


@given(st.text())
def test_bytes_are_the_text(plain: Tokenizer, text: str) -> None:
    assert plain.encode(text) == list(text.encode())
    assert plain.decode(plain.encode(text)) == text
    # numpy's short cut is the Hugging Face tokenizer itself:
    assert plain.hugging_face.encode(text) == plain.encode(text)
    assert plain.hugging_face.decode(plain.encode(text)) == text


def test_every_byte_is_its_id(plain: Tokenizer) -> None:
    for low, high in ((0x00, 0x80), (0x80, 0x800), (0x800, 0x900), (0x10000, 0x10040)):
        text = "".join(map(chr, range(low, high)))
        assert plain.hugging_face.encode(text) == list(text.encode())
    table = plain.hugging_face.get_vocab()
    assert [table[character] for character in byte_characters()] == list(range(256))


def test_bytes_facts(plain: Tokenizer) -> None:
    assert (plain.name, plain.vocab_size, plain.is_bytes) == ("bytes", 259, True)
    assert (plain.bos_id, plain.eos_id, plain.pad_id) == (256, 257, 258)
    assert plain.decode([72, 105, 257]) == "Hi<|eos|>"
    assert plain.decode([0xC3]) == "\ufffd"
    assert "bytes: 259 ids" in repr(plain)


@given(st.text(alphabet=st.sampled_from("the cat's 三🙂\n <|eos>"), max_size=60))
def test_bpe_round_trip(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.hugging_face.encode(text) == bpe.encode(text)


@given(st.text())
def test_bpe_round_trip_of_any_text(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("kind", ["plain", "bpe"])
@pytest.mark.parametrize("with_config", [False, True])
def test_folder_loads_with_transformers_alone(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, with_config: bool
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path)
    if with_config:  # a model's folder
        (tmp_path / "config.json").write_text('{"model_type": "not-registered"}')
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    again = load_tokenizer(tmp_path)
    assert again.name == tokenizer.name
    assert again.fingerprint == tokenizer.fingerprint
    assert again.is_bytes == tokenizer.is_bytes
    assert again.vocab_size == tokenizer.vocab_size == len(loaded)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    for text in AWKWARD:
        assert loaded.encode(text) == tokenizer.encode(text) == again.encode(text)
        assert loaded.decode(tokenizer.encode(text)) == text
        assert loaded.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_padding_of_the_saved_tokenizer_works(plain: Tokenizer, tmp_path: Path) -> None:
    plain.save(tmp_path)
    batch = AutoTokenizer.from_pretrained(str(tmp_path))(["abc", "d"], padding=True)
    assert batch["input_ids"][1] == [100, 258, 258]
    assert batch["attention_mask"][1] == [1, 0, 0]


def test_save_and_use_do_not_disturb_one_another(bpe: Tokenizer, tmp_path: Path) -> None:
    before = bpe.encode(TRAINING[0])
    bpe.hugging_face(["a", "long text"], padding="max_length", max_length=3, truncation=True)
    assert bpe.encode(TRAINING[0]) == before
    bpe.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(TRAINING[0]) == before


def test_bpe_is_trained_whole_and_the_same_every_time(bpe: Tokenizer) -> None:
    assert (bpe.name, bpe.vocab_size) == ("bpe:290", 290)
    assert (bpe.bos_id, bpe.eos_id, bpe.pad_id) == (287, 288, 289)
    assert not bpe.is_bytes
    assert len(bpe.encode(TRAINING[0])) < len(TRAINING[0].encode()) / 2
    assert train_bpe(iter(TRAINING), 290).fingerprint == bpe.fingerprint


def test_bpe_counts_each_tokens_own_bytes(bpe: Tokenizer) -> None:
    for text in [*AWKWARD, *TRAINING]:
        [(ids, ends)] = bpe.encode_pieces([text])
        assert ids.tolist() == bpe.encode(text)
        characters = bpe.hugging_face.convert_ids_to_tokens(ids.tolist())
        raw = [bytes(byte_characters().index(c) for c in token) for token in characters]
        assert b"".join(raw) == text.encode()
        assert ends.tolist() == np.cumsum([len(part) for part in raw]).tolist()


def test_dropped_white_space_counts_with_the_token_after_it(word_pieces: Tokenizer) -> None:
    [(ids, ends)] = word_pieces.encode_pieces(["  The  cats é.\n"])
    assert word_pieces.hugging_face.convert_ids_to_tokens(ids.tolist()) == [
        "the", "cat", "##s", "é", ".",
    ]  # fmt: skip
    assert ends.tolist() == [5, 10, 11, 14, 16]  # é is two bytes; the last takes the newline


def test_unknown_words_still_count(word_pieces: Tokenizer) -> None:
    [(ids, ends)] = word_pieces.encode_pieces(["三つ the"])
    assert ends[-1] == len("三つ the".encode())
    assert len(ids) == len(ends)
    [(none, no_ends)] = word_pieces.encode_pieces(["  "])
    assert len(none) == len(no_ends) == 0


def test_a_space_put_in_front_is_not_text(bpe: Tokenizer, tmp_path: Path) -> None:
    backend = Backend.from_str(bpe.hugging_face.backend_tokenizer.to_str())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=True)
    tokenizer = wrapped(backend, tmp_path)
    for text in ["the cat", " the cat", "三つ"]:
        [(ids, ends)] = tokenizer.encode_pieces([text])
        assert len(ids) == len(ends)
        assert ends[-1] == len(text.encode())
        assert (np.diff(ends, prepend=0) >= 0).all()


def test_byte_fallback_gives_a_character_to_its_first_token(tmp_path: Path) -> None:
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257}
    backend = Backend(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer = wrapped(backend, tmp_path)
    [(ids, ends)] = tokenizer.encode_pieces(["a 三a"])
    assert ids.tolist() == [257, 256, *"三".encode(), 257]
    assert ends.tolist() == [1, 2, 5, 5, 5, 6]


def test_a_foreign_folder_is_known_by_its_name(
    word_pieces: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_pieces.hugging_face.save_pretrained(str(tmp_path / "theirs"))
    monkeypatch.chdir(tmp_path / "theirs")
    assert load_tokenizer(".").name == load_tokenizer(tmp_path / "theirs").name == "theirs"


def test_bytes_with_an_added_word_are_not_plain_bytes(plain: Tokenizer, tmp_path: Path) -> None:
    plain.save(tmp_path)
    foreign = AutoTokenizer.from_pretrained(str(tmp_path))
    foreign.add_tokens(["word"])
    tokenizer = Tokenizer(foreign, "foreign")
    assert not tokenizer.is_bytes
    assert tokenizer.encode("a word") == [97, 32, 259]
    [(ids, ends)] = tokenizer.encode_pieces(["a word é"])
    assert ids.tolist() == [97, 32, 259, 32, *"é".encode()]
    assert ends.tolist() == [1, 2, 6, 7, 9, 9]


def test_truncation_in_a_foreign_folder_is_not_applied(bpe: Tokenizer, tmp_path: Path) -> None:
    backend = Backend.from_str(bpe.hugging_face.backend_tokenizer.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = wrapped(backend, tmp_path)
    assert tokenizer.encode("the cat sat on the mat") == bpe.encode("the cat sat on the mat")
    [(ids, _)] = tokenizer.encode_pieces(["a"])
    assert len(ids) == 1


def test_names_of_special_tokens_are_text(bpe: Tokenizer, plain: Tokenizer) -> None:
    for tokenizer in (bpe, plain):
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(tokenizer.encode("<|bos|><|eos|>"))


@pytest.mark.parametrize("index", [-1, 259])
def test_ids_outside_are_refused(plain: Tokenizer, index: int) -> None:
    with pytest.raises(ValueError, match=f"tokenizer bytes: id {index}, expected 0 to 258"):
        plain.decode([65, index])


def test_bpe_size() -> None:
    assert bpe_size("bpe:4096") == 4096
    assert bpe_size("bpe:260") == 260
    assert bpe_size("bytes") is None
    assert bpe_size("bpemb") is None
    assert bpe_size("bpe/model") is None
    for spec in ("bpe", "bpe:", "bpe:x", "bpe1000", "bpe-1000", "BPE:1000", "bpe:1e3"):
        with pytest.raises(ValueError, match=r"expected bpe:N, e\.g\."):
            bpe_size(spec)
    for spec in ("bpe:0", "bpe:259"):
        with pytest.raises(ValueError, match="N is too small; expected at least 260"):
            bpe_size(spec)


def test_a_folder_may_be_called_bpe(
    bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bpe.save(tmp_path / "bpe-1")
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("bpe-1").vocab_size == 290


def test_text_without_enough_merges() -> None:
    with pytest.raises(ValueError, match=r"'bpe:5000': the training split yields (\d+) ids") as c:
        train_bpe(["abcabcabc"], 5000)
    assert "at most" in str(c.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byts", "unknown tokenizer 'byts'; expected 'bytes'.*nearest: 'bytes'"),
        ("Bytes", "nearest: 'bytes'"),
        ("./nowhere", "no such folder; expected 'bytes'"),
        ("a/b/c", "no such folder"),
        ("bpe:1000", "is trained on a text"),
        ("nobody/nothing", "'nobody/nothing' can't be loaded: "),
        ("gpt2", "'gpt2' can't be loaded: "),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(spec)
    assert "\n" not in str(caught.value)


def test_refused_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="can't be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no such folder"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_slow_tokenizers_are_refused(
    plain: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.save(tmp_path)
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match=r"without a fast form; expected .*tokenizer\.json"):
        load_tokenizer(tmp_path)
