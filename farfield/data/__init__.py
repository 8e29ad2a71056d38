"""Text to tokens: sources, tokenizers, splits that never overlap, and a cache that is never stale.

    corpus = load_corpus("kjv", "bytes")
    corpus.train.block(0, 129)
    corpus.test.byte_count(0, len(corpus.test))

Nothing here imports torch, and the heavy readers (`transformers`, `datasets`, `pyarrow`) are
imported by the call that needs them.
"""

from farfield.data.corpus import Corpus, Splits, load_corpus
from farfield.data.tokenizer import Tokenizer, load_tokenizer
from farfield.data.tokens import TokenStream

__all__ = ["Corpus", "Splits", "TokenStream", "Tokenizer", "load_corpus", "load_tokenizer"]
